"""Parameters frozen and unfrozen while they train, at stages 0 to 3."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import (
    Free,
    assert_close,
    assert_equal,
    assert_gradients,
    mean_of_ranks,
    mlp,
    mlp_loss,
    step_both,
    weights,
)
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

SETTINGS: dict[str, Any] = {"units": [nn.Linear], "min_unit_numel": 0, "timeout": 20.0}
SMALL = {**SETTINGS, "bucket_bytes": 128, "first_bucket_bytes": 64}


def _loss(step: int) -> Any:
    return lambda model, rank: mlp_loss(model, rank, step)


def _freeze(model: nn.Module, step: int) -> None:
    """Layer by layer from the end, then back, then the biases alone."""
    trained = [["3."], ["2.", "3."], ["0.", "2.", "3."], ["3."], ["bias"], [""]][step]
    for name, p in model.named_parameters():
        p.requires_grad_(any(part in name for part in trained))


def _layer_by_layer(rank: int, world: int) -> None:
    results = []
    for stage in range(4):
        for settings in (SETTINGS, SMALL):
            model, plain = mlp(), mlp()
            _freeze(model, 0)
            _freeze(plain, 0)
            opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **settings)
            other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
            for step in range(6):
                _freeze(model, step)
                _freeze(plain, step)
                step_both(model, opt, _loss(step), plain, other, rank, world)
                for p, q in zip(model.parameters(), plain.parameters(), strict=True):
                    state = other.state.get(q, {})
                    got = zero.full_state(p)
                    assert got.keys() == state.keys(), (stage, step)
                    assert not state or got["step"] == state["step"], (stage, step)
            assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
            saved = opt.state_dict()
            assert list(saved["state"]) == list(range(len(list(model.parameters()))))
            torch.optim.AdamW(mlp().parameters()).load_state_dict(saved)
            results.append(weights(model))
    for result in results[1:]:
        assert_equal(result, results[0])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_layers_unfrozen_one_after_the_other(world: int) -> None:
    run(_layer_by_layer, world)


def _first_backward(rank: int, world: int, stage: int) -> None:
    """What is unfrozen counts in full from its first backward on, however that is run."""
    for quiet, clear in ((False, True), (True, True), (True, False)):
        model, plain = mlp(), mlp()
        for net in (model, plain):
            net[0].weight.requires_grad_(False)
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, momentum=0.9, **SETTINGS)
        other = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
        step_both(model, opt, _loss(0), plain, other, rank, world)
        opt.zero_grad(set_to_none=clear)
        for net in (model, plain):
            net[0].weight.requires_grad_(True)
        first, second = (mean_of_ranks(plain, _loss(step), world) for step in (1, 2))
        if quiet:
            with opt.no_sync():
                mlp_loss(model, rank, 1).backward()
        else:
            mlp_loss(model, rank, 1).backward()
        mlp_loss(model, rank, 2).backward()
        total = {name: first[name] + second[name] for name in first}
        assert_gradients(model, total)
        if stage > 0:
            assert type(model[0].weight.grad).__name__ == "ShardedGradient"
        norm = nn.utils.get_total_norm(list(total.values()))
        torch.testing.assert_close(opt.clip_grad_norm_(0.1), norm, rtol=1e-5, atol=0.0)
        for name, p in plain.named_parameters():
            p.grad = total[name]
        nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
        opt.step()
        other.step()
        assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_the_first_backward_counts(world: int) -> None:
    run(at_each_stage, world, _first_backward)


def _one_rank_only(rank: int, world: int, stage: int) -> None:
    model = Free(a=torch.ones(5), b=torch.ones(5))
    model.b.requires_grad_(False)
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1)
    model.b.requires_grad_(rank == 1)
    for _ in range(2):
        (model.a + model.b).sum().backward()
        assert zero.full_grad(model.b).tolist() == [0.5] * 5
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(zero.full_param(model.b), torch.full((5,), 0.9))


def test_unfrozen_on_one_rank_only_counts_as_zero_elsewhere() -> None:
    run(at_each_stage, 2, _one_rank_only)


def _frozen_again(rank: int, world: int, stage: int) -> None:
    """No gradient, no step; memory stays, and so do moments until it is unfrozen again."""
    model = Free(a=torch.ones(5), b=torch.ones(5))
    model.b.requires_grad_(False)
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, momentum=0.9)
    b, moment = 1.0, None
    for trains in (False, True, True, False, False, True):
        model.b.requires_grad_(trains)
        (model.a + model.b).sum().backward()
        assert (model.b.grad is not None) == trains
        opt.step()
        opt.zero_grad()
        if trains:
            moment = 1.0 if moment is None else 0.9 * moment + 1.0
            b -= 0.1 * moment
        assert zero.full_param(model.b).tolist() == pytest.approx([b] * 5)
    assert zero.full_state(model.b)["momentum_buffer"].tolist() == pytest.approx([moment] * 5)


def test_frozen_again_and_unfrozen_again() -> None:
    run(at_each_stage, 2, _frozen_again)


def _costs_nothing(rank: int, world: int, stage: int) -> None:
    """What is frozen is not reduced and has no state, until it is unfrozen."""
    model = Free(a=torch.ones(64), b=torch.ones(128))
    model.b.requires_grad_(False)
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)

    def step() -> tuple[int, dict[str, int]]:
        before = zero.report(opt).as_dict()["traffic"]
        (model.a.sum() + model.b.sum()).backward()
        after = zero.report(opt).as_dict()["traffic"]
        opt.step()
        opt.synchronize()
        held = zero.report(opt).as_dict()["held"]
        opt.zero_grad()
        kinds = ("reduce_scatter", "all_reduce")
        return sum(after[kind] - before[kind] for kind in kinds), held

    factor = 2 if stage == 0 else 1  # of (world - 1) / world, here one half
    shards = 1 if stage == 0 else 2
    sent, held = step()
    assert sent == factor * 4 * 64 // 2
    assert held["optimizer_state"] == 2 * 4 * 64 // shards
    assert held["parameters"] == 4 * 192 // (2 if stage == 3 else 1)
    model.b.requires_grad_(True)
    for _ in range(2):
        sent, held = step()
        assert sent == factor * 4 * 192 // 2
        assert held["optimizer_state"] == 2 * 4 * 192 // shards
        assert held["parameters"] == 4 * 192 // (2 if stage == 3 else 1)
    theory = zero.report(opt).as_dict()["theory"]["held"]
    assert theory["optimizer_state"] == 2 * 4 * 192 // shards


def test_bytes_of_what_is_frozen_and_unfrozen() -> None:
    run(at_each_stage, 2, _costs_nothing)


def _with_masters(rank: int, world: int, stage: int) -> None:
    for other in ("sgd", torch.optim.SGD):
        model = Free(a=torch.ones(5), b=torch.ones(5))
        model.b.requires_grad_(False)
        opt = zero.ZeroOptimizer(
            model, other, stage=stage, lr=1e-4, param_dtype=torch.bfloat16, timeout=20.0
        )
        model.b.requires_grad_(True)
        for _ in range(100):
            (model.a + model.b).sum().backward()
            opt.step()
            opt.zero_grad()
        for p in (model.a, model.b):  # E21, wrapped as trainable and as frozen
            torch.testing.assert_close(zero.full_param(p), torch.full((5,), 0.99))
            with zero.gathered([p]):
                assert p.dtype == torch.bfloat16
                assert p.tolist() == [0.98828125] * 5


def test_e21_masters_of_what_was_frozen() -> None:
    run(at_each_stage, 2, _with_masters)


def _foreign(rank: int, world: int, stage: int) -> None:
    for cls in (torch.optim.RMSprop, torch.optim.Adagrad):  # the latter makes its state at once
        model, plain = mlp(), mlp()
        for net in (model, plain):
            net[0].requires_grad_(False)
        opt = zero.ZeroOptimizer(model, cls, stage=stage, lr=1e-2, **SETTINGS)
        other = cls(plain.parameters(), lr=1e-2)
        for step in range(4):
            for net in (model, plain):
                net[0].requires_grad_(step > 1)
            step_both(model, opt, _loss(step), plain, other, rank, world)
        assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
        saved = copy.deepcopy(opt.state_dict())
        for index, state in other.state_dict()["state"].items():
            assert_close(saved["state"][index], state, rtol=1e-4, atol=1e-5)
        # Its state goes into an optimizer that has it frozen still.
        fresh = mlp()
        fresh[0].requires_grad_(False)
        fresh.load_state_dict(weights(model))
        loaded = zero.ZeroOptimizer(fresh, cls, stage=stage, lr=1e-2, **SETTINGS)
        loaded.load_state_dict(saved)
        fresh[0].requires_grad_(True)
        step_both(fresh, loaded, _loss(4), plain, other, rank, world)
        assert_close(weights(fresh), weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_classes_of_torch_step_what_is_unfrozen(world: int) -> None:
    run(at_each_stage, world, _foreign)


def _resumed(rank: int, world: int, stage: int) -> None:
    """Native state of a parameter that is frozen when it is loaded, and unfrozen then."""
    plain = mlp()
    other = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(2):
        for name, gradient in mean_of_ranks(plain, _loss(step), world).items():
            plain.get_parameter(name).grad = gradient
        other.step()
    model = mlp()
    model[0].requires_grad_(False)
    model.load_state_dict(plain.state_dict())
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **SETTINGS)
    opt.load_state_dict(copy.deepcopy(other.state_dict()))
    assert_close(opt.state_dict()["state"][0], other.state_dict()["state"][0])
    plain[0].requires_grad_(False)
    step_both(model, opt, _loss(2), plain, other, rank, world)
    model[0].requires_grad_(True)
    plain[0].requires_grad_(True)
    step_both(model, opt, _loss(3), plain, other, rank, world)
    assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


def test_state_of_frozen_parameters_is_loaded() -> None:
    run(at_each_stage, 2, _resumed)


def _scaled(rank: int, world: int, stage: int) -> None:
    """torch's GradScaler sees the reduced gradient of the first backward, too."""
    model = Free(a=torch.ones(5), b=torch.ones(5))
    model.b.requires_grad_(False)
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    model.b.requires_grad_(True)
    scaler.scale((model.a + 2.0 * (rank + 1) * model.b).sum()).backward()
    scaler.unscale_(opt)
    assert zero.full_grad(model.b).tolist() == [3.0] * 5
    scaler.step(opt)
    torch.testing.assert_close(zero.full_param(model.b), torch.full((5,), 0.7))


def test_loss_scaling_of_what_is_unfrozen() -> None:
    run(at_each_stage, 2, _scaled)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))

    def forward(self) -> torch.Tensor:
        return (self.a * 1.0 + self.b).sum()  # `b` has its gradient first


def _raises_then_goes_on(rank: int, world: int, stage: int) -> None:
    """A backward that raises on one rank just when a parameter was unfrozen."""
    model = Pair()
    model.b.requires_grad_(False)
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, timeout=10.0)
    model.b.requires_grad_(True)

    def boom(gradient: torch.Tensor) -> torch.Tensor:
        raise ValueError("boom")

    handle = model.a.register_hook(boom) if rank == 0 else None
    with pytest.raises((ValueError, RuntimeError), match=r"boom|rank 0"):
        model().backward()
    if handle is not None:
        handle.remove()
    opt.zero_grad()
    for _ in range(2):
        model().backward()
        assert zero.full_grad(model.b).tolist() == [1.0] * 5
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(zero.full_param(model.b), torch.full((5,), 0.8))


def test_an_error_in_the_first_backward_leaves_a_usable_state() -> None:
    run(at_each_stage, 2, _raises_then_goes_on)
