"""Stage 3 trains the same numbers as stage 0, and takes the memory and traffic of theory."""

from __future__ import annotations

import re
import time

import pytest
import torch
from models import assert_close, assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from sharded_models import (
    WHOLE,
    padded_bytes,
    square_layers,
    train_gpt,
    units_of_gpt,
    wander,
)
from torch import nn

import zero_torch as zero

RESHARD = (True, False, "auto")
PREFETCH = (0, 1, 3)
PRODUCT = [(reshard, prefetch) for reshard in RESHARD for prefetch in PREFETCH]
A_FEW = [(True, 1), (False, 0), ("auto", 3)]


def _same_bits(rank: int, world: int, settings: list) -> None:
    want, losses, norms = train_gpt(make_gpt(seed=rank), 0, rank)
    for reshard, prefetch in settings:
        got, own_losses, own_norms = train_gpt(
            make_gpt(seed=rank), 3, rank, reshard_after_forward=reshard, prefetch=prefetch
        )
        where = f"reshard_after_forward={reshard}, prefetch={prefetch}"
        assert own_losses == losses, where
        assert own_norms == norms, where
        assert_equal(got, want)
    # Units of every size, and those that the default merges.
    for extra in ({"min_unit_numel": 1500}, {"units": [nn.Linear]}, {"units": []}):
        model = make_gpt(seed=rank)
        opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **{**WHOLE, **extra})
        for step in range(20):
            loss_of(model, batch(step, rank)).backward()
            opt.clip_grad_norm_(0.5)
            opt.step()
            opt.zero_grad()
        assert_equal(weights(model), want)


@pytest.mark.parametrize(
    ("world", "settings"), [(1, A_FEW), (2, PRODUCT), (3, A_FEW), (4, A_FEW)], ids=str
)
def test_the_same_bits_as_stage_0(world: int, settings: list) -> None:
    run(_same_bits, world, settings)


def _traffic(rank: int, world: int) -> None:
    for reshard, prefetch in PRODUCT:
        model = make_gpt()
        units = [padded_bytes(unit, world) for unit in units_of_gpt(model)]
        padded = sum(units)
        numel = sum(p.numel() for p in model.parameters())
        opt = zero.ZeroOptimizer(
            model, stage=3, reshard_after_forward=reshard, prefetch=prefetch, **WHOLE
        )
        before = zero.report(opt).as_dict()["traffic"]
        assert set(before.values()) == {0}  # set-up is apart
        for step in range(4):
            loss_of(model, batch(step, rank)).backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            report = zero.report(opt).as_dict()
            sent = {kind: report["traffic"][kind] - before[kind] for kind in before}
            before = report["traffic"]
            if reshard == "auto" and step == 0:
                continue  # which block is the last is not known yet
            # "auto" keeps the root and the last block from forward to backward.
            gathered = {True: 2 * padded, False: padded, "auto": 2 * padded - units[0] - units[-1]}
            assert sent == {
                "all_gather": gathered[reshard] // world * (world - 1),
                "reduce_scatter": padded // world * (world - 1),
                "all_reduce": 0,
                "broadcast": 0,
            }, (reshard, prefetch, step, sent, padded, units)
            held = report["held"]
            assert held["parameters"] == padded // world
            assert held["gradients"] == padded // world
            assert held["optimizer_state"] == 2 * padded // world
            theory = report["theory"]
            assert theory["held"]["parameters"] == 4 * numel // world
            factor = 2 if reshard is False else 3
            assert theory["traffic"] == factor * 4 * numel * (world - 1) // world


@pytest.mark.parametrize("world", [2, 3])
def test_traffic_and_memory_equal_theory(world: int) -> None:
    run(_traffic, world)


def _peak(rank: int, world: int) -> None:
    layer = 64 * 64 * 4
    count = 10
    for prefetch, reshard, units in ((1, True, 2), (0, True, 2), (3, True, 4), (1, False, count)):
        model = square_layers(count)
        opt = zero.ZeroOptimizer(
            model, stage=3, prefetch=prefetch, reshard_after_forward=reshard, **WHOLE
        )
        peaks = []
        for _ in range(6):
            for _ in range(2):  # accumulation keeps the bound
                model(torch.ones(2, 64)).sum().backward()
            report = zero.report(opt).as_dict()
            assert report["held"]["parameters"] == count * layer // world
            assert report["held"]["gradients"] == count * layer // world
            peaks.append(report["peak"]["buffers"])
            assert peaks[-1] <= (units + 2) * layer, (prefetch, reshard, peaks[-1] / layer)
            opt.step()
            opt.zero_grad()
        assert peaks[2] == peaks[5], (prefetch, reshard, peaks)


def _first_step_of_auto(rank: int, world: int) -> None:
    """Not knowing which block is the last is no reason to keep them all."""
    layer = 64 * 64 * 4
    model = square_layers()
    opt = zero.ZeroOptimizer(model, stage=3, reshard_after_forward="auto", **WHOLE)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        assert zero.report(opt).as_dict()["peak"]["buffers"] <= 5 * layer
        opt.step()


def test_auto_keeps_the_last_block_only() -> None:
    run(_first_step_of_auto, 2)


def _peak_of_inference(rank: int, world: int) -> None:
    layer = 64 * 64 * 4
    model = zero.ZeroModule(square_layers(), stage=3, **WHOLE)
    with torch.no_grad():
        for _ in range(3):
            model(torch.ones(2, 64))
    report = zero.report(model).as_dict()
    assert report["peak"]["buffers"] <= 2 * layer
    assert report["held"] == {
        "parameters": 10 * layer // world,
        "gradients": 0,
        "optimizer_state": 0,
        "buffers": report["held"]["buffers"],
    }


def _live_limit(rank: int, world: int) -> None:
    """max_live_numel bounds what is gathered ahead."""
    layer = 64 * 64
    model = square_layers()
    opt = zero.ZeroOptimizer(model, stage=3, prefetch=3, max_live_numel=2 * layer, **WHOLE)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        assert zero.report(opt).as_dict()["peak"]["buffers"] <= 4 * 4 * layer
        opt.step()


def _memory(rank: int, world: int) -> None:
    _peak(rank, world)
    _peak_of_inference(rank, world)
    _live_limit(rank, world)


def test_peaks_are_a_few_units_and_stay() -> None:
    run(_memory, 2)


def _micro_batches(rank: int, world: int, stage: int, quiet: bool) -> dict[str, torch.Tensor]:
    model = make_gpt()
    wrapped = zero.ZeroModule(model, stage=stage, **WHOLE)
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    padded = sum(padded_bytes(unit, world) for unit in units_of_gpt(model))
    for step in range(5):
        for micro in range(3):
            last = micro == 2
            wrapped.set_requires_gradient_sync(last or not quiet)
            before = zero.report(opt).as_dict()["traffic"]["reduce_scatter"]
            loss_of(wrapped, batch(step, rank, micro)).backward()
            report = zero.report(opt).as_dict()
            sent = report["traffic"]["reduce_scatter"] - before
            if stage == 3:
                reduced = last or not quiet
                assert sent == (padded // world * (world - 1) if reduced else 0)
                whole = report["held"]["gradients"] + report["held"]["buffers"]
                assert reduced or whole >= padded
                if step % 2 == 0 and not last:  # evaluation in between changes nothing
                    with torch.no_grad():
                        loss_of(wrapped, batch(99, rank))
        opt.step()
        opt.zero_grad()
    return weights(model)


def _no_sync(rank: int, world: int) -> None:
    for quiet in (False, True):
        got = _micro_batches(rank, world, 3, quiet)
        assert_equal(got, _micro_batches(rank, world, 2, quiet))
        assert_close(got, _micro_batches(rank, world, 0, quiet), rtol=1e-4, atol=1e-5)
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)
    with opt.no_sync():
        loss_of(model, batch(0, rank)).backward()
    local = make_gpt()
    loss_of(local, batch(0, rank)).backward()
    for p, q in zip(model.parameters(), local.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad)  # whole, and this rank's own
    opt.step()  # reduces what is left
    plain = make_gpt()
    other = zero.ZeroOptimizer(plain, stage=0, lr=1e-2)
    loss_of(plain, batch(0, rank)).backward()
    other.step()
    assert_equal(weights(model), weights(plain))


def _orders(step: int) -> list[int]:
    fixed = {3: [], 4: [0, 0], 5: [1, 2, 1, 2, 1], 6: [4], 7: [4, 3, 2, 1, 0], 8: [0, 1, 2, 3, 4]}
    generator = torch.Generator().manual_seed(step)
    count = int(torch.randint(1, 8, (), generator=generator))
    return fixed.get(step, torch.randint(0, 5, (count,), generator=generator).tolist())


def _train_wandering(
    rank: int, stage: int, **settings: object
) -> tuple[dict[str, torch.Tensor], list[float]]:
    model = wander()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **WHOLE, **settings)
    losses = []
    for step in range(24):
        x = torch.randn(4, 9, generator=torch.Generator().manual_seed(7 * step + rank))
        if step % 4 == 1:  # two graphs of different orders in one backward
            loss = model(x, _orders(step)).square().sum() + model(x, _orders(step + 50)).sum()
        else:
            loss = model(x, _orders(step)).square().sum()
        if step % 5 == 2:
            with torch.no_grad():
                model(x, _orders(step + 100))
        if step % 6 == 5:  # a forward whose graph is dropped
            model(x, _orders(step + 200))
        if step == 13:  # a forward that fails half way
            with pytest.raises(IndexError):
                model(x, [0, 1, 99])
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return weights(model), losses


def _changing_order(rank: int, world: int) -> None:
    want, losses = _train_wandering(rank, 0)
    for reshard, prefetch in (*A_FEW, (True, 0), (True, 3)):
        got, own = _train_wandering(rank, 3, reshard_after_forward=reshard, prefetch=prefetch)
        assert own == losses, (reshard, prefetch)
        assert_equal(got, want)


def _graphs(rank: int, world: int) -> None:
    _no_sync(rank, world)
    _changing_order(rank, world)


def test_micro_batches_no_sync_and_changing_orders() -> None:
    run(_graphs, 2)


def _different_orders(rank: int, world: int, where: str) -> tuple[str, float]:
    model = wander()
    opt = zero.ZeroOptimizer(model, stage=3, timeout=8, **WHOLE)
    x = torch.ones(2, 9)
    if where == "later":
        for _ in range(2):
            model(x, [0, 1, 2]).sum().backward()
            opt.step()
    start = time.monotonic()
    with pytest.raises(RuntimeError) as caught:
        model(x, ([0, 1, 2], [1, 0, 2])[rank]).sum().backward()
    return str(caught.value), time.monotonic() - start


@pytest.mark.parametrize("where", ["first", "later"])
def test_ranks_that_disagree_get_an_error_with_both_units(where: str) -> None:
    for message, seconds in run(_different_orders, 2, where):
        found = re.search(r"rank 0 is in (.+?) at step.*rank 1 is in (.+?) at step", message)
        assert found is not None, message
        assert "unit 'blocks." in found[1] and "unit 'blocks." in found[2], message
        assert found[1] != found[2], message
        assert seconds < 13
