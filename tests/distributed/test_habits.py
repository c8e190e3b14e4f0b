"""What users of DDP, FSDP and torch's optimizers do on their first day (E19, E101 to E103)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Free, mlp, mlp_loss, shard
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero


def _token_mean(rank: int, world: int, stage: int) -> None:
    tokens = [[2.0], [4.0, 6.0, 8.0]][rank]
    loss_of: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "scaled by the user": lambda w: (w * torch.tensor(tokens)).sum() * world / 4,
        "summed": lambda w: (w * torch.tensor(tokens)).sum(),
        "mean of means": lambda w: (w * torch.tensor(tokens)).mean(),
    }

    def gradient(loss: str, divide: Any = None, **settings: Any) -> float:
        model = Free(w=torch.ones(()))
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0, **settings)
        for _ in range(2):  # a step's divisor is of that step
            loss_of[loss](model.w).backward()
            if divide is not None:
                assert divide(opt) == 4.0
            found = zero.full_grad(model.w).item()
            opt.step()
            opt.zero_grad()
        assert zero.full_param(model.w).item() == 1 - 2 * found
        return found

    assert gradient("scaled by the user") == 5.0
    assert gradient("mean of means") == 4.0
    assert gradient("summed", lambda o: o.divide_grad_(4), average=False) == 5.0
    by_tokens = {"average": False, "divide": lambda o: _by_tokens(o, len(tokens))}
    assert gradient("summed", **by_tokens) == 5.0
    by_tokens["param_dtype"] = torch.bfloat16
    assert gradient("summed", **by_tokens) == 5.0


def _by_tokens(opt: zero.ZeroOptimizer, tokens: int) -> torch.Tensor:
    return opt.divide_grad_(tokens, across_ranks=True)


def _divisors(rank: int, world: int, stage: int) -> None:
    """After accumulation; divided, not multiplied by a reciprocal; bad ones change nothing."""
    model, plain = mlp(), mlp()
    opt = shard(model, stage, average=False)
    opt.set_requires_gradient_sync(False)
    mlp_loss(model, rank, 0).backward()
    opt.set_requires_gradient_sync(True)
    mlp_loss(model, rank, 1).backward()
    for r in range(world):
        (mlp_loss(plain, r, 0) + mlp_loss(plain, r, 1)).backward()
    whole = [zero.full_grad(p) for p in model.parameters()]
    for gradient, p in zip(whole, plain.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-5, atol=1e-6)
    for bad in (0.0, -1.0, float("inf"), float("nan")):
        with pytest.raises(ValueError, match="divisor"):
            opt.divide_grad_(bad)
    opt.divide_grad_(torch.tensor(3.0))
    for gradient, p in zip(whole, model.parameters(), strict=True):
        assert torch.equal(zero.full_grad(p), gradient / 3.0)


# E101


class Configured(nn.Module):
    vocab_size = 7

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
        self.config = {"width": 4}
        self.temperature = 1.0
        self.register_buffer("steps", torch.zeros(1))

    @property
    def broken(self) -> int:
        return self.missing_inside

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().sum() / self.temperature

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


def _attributes(rank: int, world: int, stage: int) -> None:
    inner = Configured()
    model = zero.ZeroModule(inner, stage=stage)
    assert model.module is inner
    assert (model.vocab_size, model.config) == (7, {"width": 4})
    assert model.steps is inner.steps
    model.temperature = 2.0
    assert inner.temperature == 2.0
    assert model.loss(torch.ones(1, 3)).shape == ()
    assert model.eval() is model and not inner.training and not inner.layers[0].training
    assert model.train().training and inner.layers[1].training
    assert not hasattr(model, "missing")
    with pytest.raises(AttributeError, match="'Configured' object has no attribute 'missing'"):
        _ = model.missing
    with pytest.raises(AttributeError, match="missing_inside"):
        _ = model.broken
    layers = zero.ZeroModule(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), stage=stage)
    assert len(layers) == 2 and [type(part) for part in layers] == [nn.Linear, nn.ReLU]
    assert layers[0] is layers.module[0]


# E102


def _shapes(rank: int, world: int, stage: int) -> None:
    model, plain = mlp(), mlp()
    opt = shard(model, stage)
    want = [(n, p.numel(), p.shape, p.ndim, p.dtype) for n, p in plain.named_parameters()]
    ids = [id(p) for p in model.parameters()]
    for step in range(3):
        for moment in ("before", "after"):
            found = [(n, p.numel(), p.shape, p.ndim, p.dtype) for n, p in model.named_parameters()]
            assert found == want, moment
            assert [id(p) for p in model.parameters()] == ids
            if moment == "before":
                mlp_loss(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
    decayed = [n for n, p in model.named_parameters() if p.ndim > 1]
    assert decayed == ["0.weight", "2.weight", "3.weight"]


# E103


def _bad_settings(rank: int, world: int) -> None:
    """On one rank alone: whatever communicated would wait for the other."""
    if rank == 1:
        model, foreign = mlp(), nn.Linear(2, 2)
        w = nn.Parameter(torch.ones(2))
        bad: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
            (ValueError, "stage 0, 1, 2 or 3", model, {"stage": -1}),
            (ValueError, "stage 0, 1, 2 or 3", model, {"stage": 4}),
            (TypeError, "stage", model, {"stage": "2"}),
            (TypeError, "stage", model, {"stage": True}),
            (ValueError, "bucket_bytes", model, {"bucket_bytes": 0}),
            (ValueError, "bucket_bytes", model, {"bucket_bytes": -1}),
            (TypeError, "bucket_bytes", model, {"bucket_bytes": 1.5}),
            (TypeError, "bucket_byte", model, {"bucket_byte": 1}),
            (ValueError, "parameter", [], {}),
            (ValueError, "leaf", [w * 2], {}),
            (ValueError, "twice", [{"params": [w]}, {"params": [w]}], {}),
            (ValueError, "group", model, {"param_groups": [{"params": foreign.parameters()}]}),
        ]
        for error, message, target, given in bad:
            with pytest.raises(error, match=message):
                zero.ZeroOptimizer(target, **{"stage": 1, "lr": 0.1, **given})
    dist.barrier()
    frozen = mlp()
    frozen[0].requires_grad_(False)
    zero.ZeroOptimizer(frozen, stage=1)


# Names from elsewhere


def _names_from_elsewhere(rank: int, world: int, stage: int) -> None:
    model = zero.ZeroModule(mlp(), stage=stage)
    opt = zero.ZeroOptimizer(model, "sgd", lr=0.1)
    model.unshard()
    mlp_loss(model, rank).backward()
    model.reshard()
    opt.step()
    for name, remedy in (
        ("set_is_last_backward", "no_sync"),
        ("summon_full_params", "gathered"),
        ("clip_grad_norm_", "optimizer.clip_grad_norm_"),
        ("set_modules_to_forward_prefetch", "prefetch"),
        ("backward", "loss.backward"),
        ("save_checkpoint", "zero_torch.save"),
    ):
        assert not hasattr(model, name)
        with pytest.raises(AttributeError, match=f"{name}.*{remedy}"):
            getattr(model, name)
    for name, remedy in (
        ("consolidate_state_dict", "optimizer_state_dict"),
        ("backward", "loss.backward"),
        ("overflow", "on_nonfinite"),
    ):
        assert not hasattr(opt, name)
        with pytest.raises(AttributeError, match=f"'ZeroOptimizer'.*{name}.*{remedy}"):
            getattr(opt, name)
    with pytest.raises(AttributeError, match="'ZeroOptimizer' object has no attribute 'other'"):
        _ = opt.other


def _ddp_of_a_managed_model(rank: int, world: int, stage: int) -> None:
    model = mlp()
    opt = shard(model, stage)
    with pytest.raises(RuntimeError, match=r"zero_torch\.unwrap"):
        nn.parallel.DistributedDataParallel(model)
    zero.unwrap(model)
    del opt
    nn.parallel.DistributedDataParallel(model)
    if stage < 3:
        model = mlp()
        opt = shard(model, stage)
        del opt  # which makes it a plain one
        nn.parallel.DistributedDataParallel(model)


def test_e19_mean_over_tokens() -> None:
    run(at_each_stage, 2, _token_mean)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_gradients_are_divided(world: int) -> None:
    run(at_each_stage, world, _divisors)


def test_e101_attributes_through_the_wrapper() -> None:
    run(at_each_stage, 2, _attributes)


def test_e102_shapes_and_identity_stay() -> None:
    run(at_each_stage, 2, _shapes)


def test_e103_bad_settings_raise_before_any_communication() -> None:
    run(_bad_settings, 2)


def test_names_from_elsewhere_say_what_to_use() -> None:
    run(at_each_stage, 2, _names_from_elsewhere)


def test_ddp_of_a_managed_model_is_refused() -> None:
    run(at_each_stage, 2, _ddp_of_a_managed_model)
