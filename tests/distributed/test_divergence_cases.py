"""Units that run several times, or not on every rank: reports by users (E01, E25-E27)."""

from __future__ import annotations

import contextlib
import copy
import itertools
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import assert_close, mean_of_ranks, weights
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

TIMEOUT = 8.0


class Scale(nn.Module):
    def __init__(self, count: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(count, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w


def _error_of_all(action: Callable[[], Any], *names: str) -> None:
    """An error within the timeout, with the names of these units; and all ranks go on."""
    began = time.monotonic()
    with pytest.raises(Exception, match="rank") as caught:
        action()
    assert time.monotonic() - began < TIMEOUT + 5
    for name in names:
        assert f"'{name}'" in str(caught.value), str(caught.value)


# E01


class Looped(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = Scale(dtype=dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(self.block(x)))


def _three_uses(rank: int, world: int, stage: int) -> None:
    for dtype, units in itertools.product((torch.float32, torch.bfloat16), (None, [Scale])):
        model = Looped(dtype)
        nn.init.constant_(model.block.w, 2.0)
        opt = zero.ZeroOptimizer(
            model, "sgd", stage=stage, lr=0.0, units=units, min_unit_numel=0, bucket_bytes=64
        )
        for _ in range(2):
            model(torch.full((2,), 1.0 + rank, dtype=dtype)).sum().backward()
            opt.synchronize()
            assert zero.full_grad(model.block.w).tolist() == [18.0, 18.0]
            opt.step()
            opt.zero_grad()
        reductions = zero.report(opt).as_dict()["traffic"][
            "reduce_scatter" if stage else "all_reduce"
        ]
        bucket = 64 * world  # a shard is 64 bytes
        assert reductions == 2 * bucket * (world - 1) // world * (1 if stage else 2)


# E25, E26


class Experts(nn.Module):
    def __init__(self, counts: tuple[int, int]) -> None:
        super().__init__()
        self.experts = nn.ModuleList([Scale(count) for count in counts])

    def forward(self, x: torch.Tensor, index: int) -> torch.Tensor:
        return self.experts[index](x)


class Towers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.text, self.tower = Scale(), Scale(3)

    def forward(self, x: torch.Tensor, image: torch.Tensor | None = None) -> torch.Tensor:
        y = self.text(x).sum()
        return y if image is None else y + self.tower(image).sum()


def _experts(rank: int, world: int, stage: int) -> None:
    for counts, whole in itertools.product(((2, 2), (2, 40)), (True, False)):
        model = Experts(counts)
        given = {} if whole else {"units": [Scale], "min_unit_numel": 0}
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0, timeout=TIMEOUT, **given)

        def step(model: nn.Module = model, opt: zero.ZeroOptimizer = opt) -> None:
            model(torch.ones(1), rank).sum().backward()
            for expert in model.experts:
                assert set(zero.full_grad(expert.w).tolist()) == {0.5}
            opt.step()
            opt.zero_grad()

        if stage == 3 and not whole:
            _error_of_all(step, "experts.0", "experts.1")
        else:
            step()
            assert {v for w in weights(model).values() for v in w.tolist()} == {0.5}


def _optional_tower(rank: int, world: int, stage: int) -> None:
    for whole in (True, False):
        model = Towers()
        given = {} if whole else {"units": [Scale], "min_unit_numel": 0}
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.0, timeout=TIMEOUT, **given)

        def step(turn: int, model: nn.Module = model, opt: zero.ZeroOptimizer = opt) -> None:
            image = torch.ones(3) if rank == turn else None
            model(torch.ones(2), image).backward()
            assert zero.full_grad(model.text.w).tolist() == [1.0, 1.0]
            assert zero.full_grad(model.tower.w).tolist() == [0.5] * 3
            opt.step()
            opt.zero_grad()

        if stage == 3 and not whole:
            _error_of_all(lambda: step(1), "tower")
        else:
            step(1)
            step(0)


# E27


def _loops_of_different_length(rank: int, world: int, stage: int) -> None:
    for how in ("gathered", "unshard", "nothing"):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        plain = copy.deepcopy(model)
        wrapped = zero.ZeroModule(
            model, stage=stage, units=[nn.Linear], min_unit_numel=0, timeout=TIMEOUT
        )
        opt = zero.ZeroOptimizer(wrapped, "sgd", lr=0.1)

        def loss(net: nn.Module, rank: int) -> torch.Tensor:
            return net(torch.full((2, 3), 1.0 + rank)).square().sum()

        want = mean_of_ranks(plain, loss, world)
        whole = zero.gathered(wrapped) if how == "gathered" else contextlib.nullcontext()

        def phases(how: str = how, whole: Any = whole, net: nn.Module = wrapped) -> None:
            with whole, torch.no_grad():
                if how == "unshard":
                    net.unshard()
                for _ in range(5 if rank else 3):
                    net(torch.ones(2, 3))
                if how == "unshard":
                    net.reshard()
            loss(net, rank).backward()
            opt.step()

        if stage == 3 and how == "nothing":
            _error_of_all(phases)
            continue
        phases()
        with torch.no_grad():
            for name, p in plain.named_parameters():
                p -= 0.1 * want[name]
        assert_close(weights(model), weights(plain))


def test_e01_e25_e27_units_used_unequally() -> None:
    run(at_each_stage, 2, _three_uses, _experts, _loops_of_different_length)


def test_e26_a_tower_that_one_rank_skips() -> None:
    run(at_each_stage, 2, _optional_tower)


def _different_values_asked_for(rank: int, world: int, stage: int) -> None:
    for read in (zero.full_param, zero.full_grad, zero.full_state):
        if stage == 0 or (stage < 3 and read is zero.full_param):
            continue  # no communication
        model = Experts((100, 100))
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, timeout=TIMEOUT)
        model(torch.ones(1), 0).sum().backward()
        model(torch.ones(1), 1).sum().backward()
        opt.step()
        with pytest.raises(Exception, match=r"experts\.0\.w.*experts\.1\.w"):
            read(model.experts[rank].w)


def test_ranks_that_ask_for_different_values() -> None:
    run(at_each_stage, 2, _different_values_asked_for)
