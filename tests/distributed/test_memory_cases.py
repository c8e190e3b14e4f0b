"""Memory that comes back, peaks and bounds: reports by users of other systems (E34-E40).

What a rank holds is measured from outside: resident memory, from an allocator that gives freed
blocks back at once.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, step_both, weights
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

WIDTH, DEPTH = 512, 10
LAYER = 4 * WIDTH * WIDTH
SLACK = LAYER // 4
PAGE = 2**21  # of buffers that peers read: the last one held, and one of a peer's while it is read


@pytest.fixture(autouse=True)
def _allocator_that_gives_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the processes to be started."""
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(2**16))
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", str(2**16))


def layers(width: int = WIDTH) -> nn.Sequential:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(DEPTH)])


def shard(model: nn.Module, stage: int, rule: str = "adamw", **settings: Any) -> zero.ZeroOptimizer:
    """Each layer is a unit and a bucket."""
    given = {"lr": 1e-3, "bucket_bytes": LAYER, "first_bucket_bytes": LAYER, "min_unit_numel": 0}
    return zero.ZeroOptimizer(model, rule, stage=stage, **(given | settings))


def loss_of(model: nn.Module, rank: int) -> torch.Tensor:
    return model(torch.full((2, model[0].in_features), 1.0 + rank)).square().sum()


def _resident(kind: str = "VmRSS") -> int:
    with open("/proc/self/status") as status:
        return next(1024 * int(line.split()[1]) for line in status if line.startswith(kind))


def _measured(action: Callable[[], Any]) -> tuple[Any, int, int]:
    """What it gives, the bytes that it held at most, and those that it leaves."""
    gc.collect()
    with open("/proc/self/clear_refs", "w") as reset:
        reset.write("5")  # the peak
    before = _resident()
    result = action()
    peak = _resident("VmHWM") - before
    gc.collect()
    return result, peak, _resident() - before


# E34


def _dropped_again_and_again(rank: int, world: int) -> None:
    model_bytes = 4 * 256 * 256 * DEPTH
    seen = []
    for turn in range(20):
        model = layers(256)
        opt = shard(model, stage=turn % 4, bucket_bytes=2**20)
        loss_of(model, rank).backward()
        opt.step()
        watch = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
        if turn // 4 % 2:
            zero.unwrap(model)
        del model, opt
        gc.collect()
        assert all(ref() is None for ref in watch), turn
        seen.append(_resident())
    assert max(seen[4:]) - seen[3] <= model_bytes, [(s - seen[3]) / model_bytes for s in seen]


def test_e34_memory_is_flat_over_many_models() -> None:
    run(_dropped_again_and_again, 2, fresh=True)


# E35


def _whole_again_and_again(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = layers()
    plain = copy.deepcopy(model)
    opt = shard(model, stage, "sgd", lr=1.0)
    other = torch.optim.SGD(plain.parameters(), lr=1.0)

    def train() -> None:
        step_both(model, opt, loss_of, plain, other, rank, world)

    def whole() -> None:
        with zero.gathered(model):
            assert len(model.state_dict()) == len(weights(model)) == DEPTH

    train()
    whole()  # the pool has what it needs from here on
    held = zero.report(opt).as_dict()["held"]
    before = _resident()
    for _ in range(10):
        whole()
        assert _resident() - before <= SLACK
        assert zero.report(opt).as_dict()["held"] == held
    assert held["parameters"] == (DEPTH * LAYER // world if stage == 3 else DEPTH * LAYER)
    train()
    assert_close(weights(model), weights(plain), rtol=1e-5)


# E36


def _whole_on_rank_0(rank: int, world: int, stage: int) -> None:
    model = layers()
    opt = shard(model, stage)
    loss_of(model, rank).backward()
    opt.step()
    opt.zero_grad()
    one = LAYER + SLACK
    for part, count in ((model, DEPTH), (model[3], 1)):
        for _ in range(2):
            state, peak, left = _measured(lambda part=part: zero.state_dict(part))
            result = count * LAYER if rank == 0 and stage == 3 else 0
            assert len(state) == (count if rank == 0 else 0)
            assert abs(left - result) <= SLACK
            assert peak - result <= one, f"{(peak - result) / LAYER} layers (rank {rank})"
            del state
    # An optimizer's: of one parameter at a time, here two layers.
    state, peak, left = _measured(lambda: zero.optimizer_state_dict(opt))
    assert (len(state["state"]) == DEPTH) if rank == 0 else (state == {} and left <= SLACK)
    assert rank == 0 or peak <= 3 * LAYER + SLACK


def test_e36_one_rank_asks_for_the_whole() -> None:
    run(at_each_stage, 2, _whole_on_rank_0, fresh=True)


# E39


def _gradients_held(rank: int, world: int, stage: int) -> None:
    if stage < 2:
        return
    model = layers()
    opt = shard(model, stage, lr=0.0)
    during: list[dict[str, int]] = []
    for layer in model:
        layer.register_full_backward_hook(
            lambda *_: during.append(zero.report(opt).as_dict()["held"])
        )
    x = torch.ones(2, WIDTH, requires_grad=True)
    for step in range(2):
        for _ in range(3):  # accumulation keeps the bound
            model(x).sum().backward()
            held = zero.report(opt).as_dict()["held"]
            assert held["gradients"] == DEPTH * LAYER // world
        assert len(during) == DEPTH * 3 * (step + 1)
        opt.step()
        opt.zero_grad()
    for held in during:
        assert held["gradients"] <= DEPTH * LAYER // world
        # The bucket that is filled and the one that is reduced; units gathered at stage 3.
        assert held["buffers"] <= (2 if stage == 2 else 4) * LAYER, held["buffers"] / LAYER
    _, peak, _ = _measured(lambda: model(x).sum().backward())
    assert peak <= (3 if stage == 2 else 1) * LAYER + 2 * PAGE + SLACK, peak / LAYER
    opt.zero_grad()
    with opt.no_sync():  # this is what it costs
        model(x).sum().backward()
        held = zero.report(opt).as_dict()["held"]
        assert held["gradients"] + held["buffers"] >= DEPTH * LAYER


# E40


def _constructed(rank: int, world: int, stage: int) -> None:
    for deferred in (False, True):
        start = _resident()

        def build(deferred: bool = deferred) -> tuple[nn.Module, zero.ZeroOptimizer]:
            if not deferred:
                model = layers()
            else:
                with zero.deferred_init():
                    model = layers()
            return model, shard(model, stage)

        (model, opt), building, left = _measured(build)
        held = DEPTH * LAYER // (world if stage == 3 else 1)
        assert abs(left - held) <= LAYER + PAGE, f"{left / LAYER} layers are left"
        if deferred:
            assert building <= held + 3 * LAYER + PAGE, f"{building / LAYER} layers"

        def train(model: nn.Module = model, opt: zero.ZeroOptimizer = opt) -> None:
            for _ in range(3):
                loss_of(model, rank).backward()
                opt.step()
                opt.zero_grad()

        _, training, _ = _measured(train)
        assert building <= left + training + LAYER
        del model, opt, train
        gc.collect()
        assert _resident() - start <= 2 * LAYER


def test_e35_e39_e40_gathering_backward_and_construction() -> None:
    run(at_each_stage, 2, _whole_again_and_again, _gradients_held, _constructed, fresh=True)
