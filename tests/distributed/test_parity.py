"""The same numbers at stages 0 to 3, and those of one process."""

from __future__ import annotations

import copy

import pytest
import torch
from models import assert_close, assert_equal, batch, loss_of, make_gpt, mean_gradients, weights
from ranks import run
from torch import nn

import zero_torch as zero

STEPS = 20
SMALL = {"bucket_bytes": 8192, "first_bucket_bytes": 2048, "min_unit_numel": 0}


def _train(rank: int, world: int, stage: int) -> tuple[dict, list[list[torch.Tensor]], list]:
    """Weights, clipped gradients by step, and norms; each gradient checked bit for bit."""
    model = make_gpt(seed=rank)  # rank 0's weights must win
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **SMALL)
    gradients, norms = [], []
    for step in range(STEPS):
        twin = make_gpt()
        twin.load_state_dict(copy.deepcopy(model.state_dict()))
        loss_of(model, batch(step, rank)).backward()
        want = mean_gradients(twin, step, world)
        got = [zero.full_grad(p) for p in model.parameters()]
        for name, a, b in zip(dict(model.named_parameters()), got, want, strict=True):
            assert torch.equal(a, b), f"stage {stage}, step {step}: gradient of {name}"
        norms.append(float(opt.clip_grad_norm_(0.5)))
        assert abs(norms[-1] - nn.utils.get_total_norm(want).item()) < 1e-5 * norms[-1]
        gradients.append([zero.full_grad(p) for p in model.parameters()])
        opt.step()
        opt.zero_grad()
    return weights(model), gradients, norms


def _train_stages(rank: int, world: int) -> None:
    first, gradients, norms = _train(rank, world, 0)
    for stage in (1, 2, 3):
        other, other_gradients, other_norms = _train(rank, world, stage)
        assert_equal(other, first)
        assert other_norms == norms
        for a, b in zip(other_gradients, gradients, strict=True):
            assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    # torch's own AdamW, given the same gradients.
    reference = make_gpt()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for step in gradients:
        for p, gradient in zip(reference.parameters(), step, strict=True):
            p.grad = gradient
        plain.step()
    assert_close(first, weights(reference), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_stages_give_the_same_bits(world: int) -> None:
    run(_train_stages, world)


def _ledger(rank: int, world: int) -> None:
    for stage in (0, 1, 2):
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **SMALL)

        def step(index: int, model: nn.Module = model, opt: zero.ZeroOptimizer = opt) -> None:
            loss_of(model, batch(index, rank)).backward()
            opt.step()
            opt.zero_grad()

        step(0)
        opt.synchronize()
        before = zero.report(opt).as_dict()["traffic"]
        step(1)
        opt.synchronize()
        after = zero.report(opt).as_dict()
        held = after["held"]
        padded = held["parameters"]
        psi = 4 * sum(p.numel() for p in model.parameters())
        assert psi <= padded <= psi + 64 * (world + 2) * 30
        sent = {kind: after["traffic"][kind] - before[kind] for kind in before}
        each = padded // world * (world - 1)
        if stage == 0:
            expected = {"reduce_scatter": 0, "all_gather": 0, "all_reduce": 2 * each}
        else:
            expected = {"reduce_scatter": each, "all_gather": each, "all_reduce": 0}
        assert sent == {**expected, "broadcast": 0}, stage
        assert held["optimizer_state"] == 2 * padded // (world if stage >= 1 else 1)
        loss_of(model, batch(2, rank)).backward()
        held = zero.report(opt).as_dict()["held"]
        assert held["gradients"] == padded // (world if stage >= 2 else 1)
        largest = max(SMALL["bucket_bytes"], *(4 * p.numel() for p in model.parameters()))
        assert held["buffers"] <= (largest + 64 * (world + 2) * 30 if stage == 2 else 0)
        assert after["theory"]["held"]["parameters"] == psi


@pytest.mark.parametrize("world", [2, 3])
def test_bytes_held_and_sent_equal_theory(world: int) -> None:
    run(_ledger, world)


def _memory_at_stage_2(rank: int, world: int) -> None:
    model = nn.Sequential(*[nn.Linear(64, 64, bias=False) for _ in range(10)])
    layer = 64 * 64 * 4
    opt = zero.ZeroOptimizer(model, stage=2, lr=1e-3, bucket_bytes=layer, first_bucket_bytes=layer)
    for _ in range(3):
        for _ in range(2):  # accumulation keeps the bound
            model(torch.ones(2, 64)).sum().backward()
            report = zero.report(opt).as_dict()
            assert report["held"]["gradients"] == 10 * layer // world
            assert report["held"]["buffers"] == layer  # one bucket's memory stays
            assert report["peak"]["buffers"] <= 3 * layer
        opt.step()
        opt.zero_grad()


def test_stage_2_holds_a_shard_and_the_open_buckets() -> None:
    run(_memory_at_stage_2, 2)
