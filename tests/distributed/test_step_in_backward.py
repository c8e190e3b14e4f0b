"""Stepping while backward runs, from Python: against the same training that steps after it."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from models import Free, batch, loss_of, make_gpt, mlp, mlp_loss
from ranks import at_each_stage, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_torch as zero

SMALL: dict[str, Any] = {
    "bucket_bytes": 2048,
    "first_bucket_bytes": 512,
    "min_unit_numel": 0,
    "timeout": 30.0,
}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: zero.full_param(p).clone() for name, p in model.named_parameters()}


def _train(rank: int, stage: int, in_backward: bool, **settings: Any) -> dict[str, torch.Tensor]:
    model = make_gpt()
    opt = zero.ZeroOptimizer(
        model, stage=stage, lr=1e-2, step_in_backward=in_backward, **SMALL, **settings
    )
    scheduler = torch.optim.lr_scheduler.StepLR(opt, step_size=1, gamma=0.5)
    for step in range(4):
        loss_of(model, batch(step, rank)).backward()
        if in_backward:
            assert all(p.grad is None for p in model.parameters())
            assert zero.report(opt).as_dict()["held"]["gradients"] == 0
        opt.step()
        opt.zero_grad()
        scheduler.step()
    state = opt.state_dict()
    assert all(s["step"] == 4 for s in state["state"].values()) and len(state["state"]) > 1
    return _whole(model)


def _same_weights(rank: int, world: int, stage: int) -> None:
    cases: list[dict[str, Any]] = [{}, {"param_dtype": torch.bfloat16}]
    if stage == 3:
        cases += [
            {"reshard_after_forward": False},
            {"reshard_after_forward": "auto", "prefetch": 2},
        ]
    for settings in cases:
        want = _train(rank, stage, False, **settings)
        got = _train(rank, stage, True, **settings)
        for name, value in want.items():
            assert torch.equal(got[name], value), (settings, name)


def _against_torch(rank: int, world: int, stage: int) -> None:
    """SGD in one process on the mean of the ranks' gradients."""
    model, plain = mlp(), mlp()
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, step_in_backward=True, **SMALL)
    for step in range(3):
        mlp_loss(model, rank, step).backward()
        opt.step()
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for peer in range(world):
            plain.zero_grad()
            mlp_loss(plain, peer, step).backward()
            total = [t + p.grad for t, p in zip(total, plain.parameters(), strict=True)]
        with torch.no_grad():
            for t, p in zip(total, plain.parameters(), strict=True):
                p -= 0.1 * t / world
    for (name, got), p in zip(_whole(model).items(), plain.parameters(), strict=True):
        torch.testing.assert_close(got, p.detach(), rtol=1e-6, atol=1e-6, msg=name)


def _used_on_some_ranks(rank: int, world: int, stage: int) -> None:
    model = Free(a=torch.ones(40), b=torch.ones(40), c=torch.ones(40))
    settings = {**SMALL, "bucket_bytes": 64, "first_bucket_bytes": 64}
    opt = zero.ZeroOptimizer(
        model, "sgd", stage=stage, lr=0.1, momentum=0.9, step_in_backward=True, **settings
    )
    for step in range(4):
        loss = model.a.sum()
        if rank == 0 and step != 2:  # b: half of its gradient, and none at all in one step
            loss = loss + model.b.sum()
        loss.backward()
        opt.step()
    got = _whole(model)
    assert torch.allclose(got["a"], torch.full((40,), 1 - 0.1 - 0.19 - 0.271 - 0.3439))
    assert torch.allclose(got["b"], torch.full((40,), 1 - (0.1 + 0.19 + 0.271) / world))
    assert torch.equal(got["c"], torch.ones(40))
    assert not zero.full_state(model.c)


def _several_segments(rank: int, world: int, stage: int) -> None:
    """A layer shared by reentrant checkpoints gets several gradients in one backward."""

    def train(in_backward: bool) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        layer = nn.Linear(5, 5)
        model = nn.Sequential(layer, nn.Tanh(), nn.Linear(5, 5))
        opt = zero.ZeroOptimizer(
            model, "sgd", stage=stage, lr=0.1, step_in_backward=in_backward, **SMALL
        )
        for step in range(4):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 5, generator=generator, requires_grad=True)
            for _ in range(2):
                x = checkpoint(model, x, use_reentrant=True)
            x.square().sum().backward()
            opt.step()
            opt.zero_grad()
        return _whole(model)

    want, got = train(False), train(True)
    for name, value in want.items():
        assert torch.equal(got[name], value), name


def _the_same_traffic(rank: int, world: int, stage: int) -> None:
    def sent(in_backward: bool) -> dict[str, int]:
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, step_in_backward=in_backward, **SMALL)
        for step in range(3):
            loss_of(model, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        return zero.report(opt).as_dict()["traffic"]

    assert sent(True) == sent(False)


def _groups(rank: int, world: int, stage: int) -> None:
    """Each group's own hyper-parameters, as they are when backward begins."""
    model = Free(a=torch.ones(40), b=torch.ones(40))
    groups = [{"params": [model.a]}, {"params": [model.b], "lr": 0.01}]
    settings: dict[str, Any] = {"param_groups": groups} if stage == 3 else {}
    opt = zero.ZeroOptimizer(
        model if stage == 3 else groups,
        "sgd",
        stage=stage,
        lr=0.1,
        step_in_backward=True,
        **settings,
    )
    for factor in (1.0, 2.0, 4.0):
        opt.param_groups[0]["lr"], opt.param_groups[1]["lr"] = 0.1 * factor, 0.01 * factor
        (model.a.sum() + model.b.sum()).backward()
        opt.step()
    assert torch.allclose(zero.full_param(model.a), torch.full((40,), 0.3))
    assert torch.allclose(zero.full_param(model.b), torch.full((40,), 0.93))


def _whole_for_a_while(rank: int, world: int, stage: int) -> None:
    """Units that are whole during backward show the new weights after the step."""
    model = zero.ZeroModule(mlp(), stage=stage, step_in_backward=True, **SMALL)
    plain = zero.ZeroModule(mlp(), stage=stage, **SMALL)
    pairs = [(m, zero.ZeroOptimizer(m, "sgd", lr=0.1)) for m in (model, plain)]
    for step in range(3):
        for module, opt in pairs:
            module.unshard()
            mlp_loss(module, rank, step).backward()
            opt.step()
            opt.zero_grad()
    for p, q in zip(model.module.parameters(), plain.module.parameters(), strict=True):
        assert torch.equal(zero.full_param(p), zero.full_param(q))
    if stage == 3:
        loss = mlp_loss(model, rank)
        words = r"writeback=True.*run backward outside"
        with pytest.raises(RuntimeError, match=words), zero.gathered(model, writeback=True):
            loss.backward()


def _refusals(rank: int, world: int, stage: int) -> None:
    model = mlp()
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, step_in_backward=True, **SMALL)
    mlp_loss(model, rank).backward()
    for what, call in {
        "clip_grad_norm_": lambda: opt.clip_grad_norm_(1.0),
        "clip_grad_value_": lambda: opt.clip_grad_value_(1.0),
        "grad_norm": lambda: opt.grad_norm(),
        "grad_norms": lambda: opt.grad_norm(per_group=True),
    }.items():
        with pytest.raises(RuntimeError, match=f"{what} can't be used with step_in_backward"):
            call()
    with pytest.raises(RuntimeError, match=r"no_sync.* can't be used with step_in_backward"):
        opt.no_sync().__enter__()
    with pytest.raises(RuntimeError, match=r"expected step\(\) after each backward"):
        mlp_loss(model, rank).backward()
    opt.step()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(mlp_loss(model, rank)).backward()
    with pytest.raises(RuntimeError, match="GradScaler can't be used with step_in_backward"):
        scaler.step(opt)
    opt.step()  # a plain one is fine
    mlp_loss(model, rank).backward()
    opt.step()


def test_weights_are_those_of_stepping_after_backward() -> None:
    run(at_each_stage, 2, _same_weights, _whole_for_a_while)


def test_three_ranks_train_as_one_process() -> None:
    run(at_each_stage, 3, _against_torch)


def test_usage_is_agreed_bucket_by_bucket() -> None:
    run(at_each_stage, 2, _used_on_some_ranks, _several_segments, _groups)


def test_traffic_is_that_of_stepping_after_backward() -> None:
    run(at_each_stage, 2, _the_same_traffic)


def test_what_needs_all_gradients_is_refused() -> None:
    run(at_each_stage, 2, _refusals)


def test_a_module_needs_an_optimizer() -> None:
    model = zero.ZeroModule(mlp(), stage=2, step_in_backward=True)
    with pytest.raises(RuntimeError, match="expected an optimizer with step_in_backward"):
        mlp_loss(model, 0).backward()
    before = copy.deepcopy(model.module.state_dict())
    opt = zero.ZeroOptimizer(model, "sgd", lr=0.1)
    mlp_loss(model, 0).backward()
    opt.step()
    assert any(not torch.equal(before[k], v) for k, v in model.state_dict().items())
    del opt
    with pytest.raises(RuntimeError, match="of a model with step_in_backward is gone"):
        mlp_loss(model, 0).backward()
    with pytest.raises(ValueError, match=r'"sgd" or "lion" with step_in_backward, got RMSprop'):
        zero.ZeroOptimizer(model, torch.optim.RMSprop)


def test_a_closure_steps() -> None:
    model, plain = mlp(), mlp()
    opt = zero.ZeroOptimizer(model, "sgd", stage=1, lr=0.1, step_in_backward=True)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = mlp_loss(model, 0)
        loss.backward()
        return loss

    got = opt.step(closure)
    loss = mlp_loss(plain, 0)
    assert torch.equal(got, loss)
    loss.backward()
    with torch.no_grad():
        for p in plain.parameters():
            p -= 0.1 * p.grad
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("files", [False, True])
def test_a_late_gradient_is_an_error_that_a_checkpoint_mends(files: bool, tmp_path: Path) -> None:
    def made(in_backward: bool) -> tuple[nn.Sequential, zero.ZeroOptimizer]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        settings = {**SMALL, "bucket_bytes": 64, "first_bucket_bytes": 64}  # a parameter each
        return model, zero.ZeroOptimizer(
            model, stage=1, lr=0.1, step_in_backward=in_backward, **settings
        )

    def backward(model: nn.Module, segments: int) -> None:
        x = torch.ones(4, 5, requires_grad=True)
        for _ in range(segments):
            x = checkpoint(model, x, use_reentrant=True)
        x.sum().backward()

    model, opt = made(True)
    backward(model, 1)
    opt.step()
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    zero.save(tmp_path / "saved", model, opt)
    with pytest.raises(RuntimeError, match="got another gradient after bucket"):
        backward(model, 2)
    opt.zero_grad()
    words = "load the weights and the optimizer state of a checkpoint"
    with pytest.raises(RuntimeError, match=words):
        opt.step()
    with pytest.raises(RuntimeError, match=words):
        backward(model, 1)
    if files:
        zero.load(tmp_path / "saved", model, opt)
    else:
        model.load_state_dict(saved[0])
        opt.load_state_dict(saved[1])
    backward(model, 1)
    opt.step()
    plain, plain_opt = made(False)
    for _ in range(2):
        backward(plain, 1)
        plain_opt.step()
        plain_opt.zero_grad()
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p, q)
