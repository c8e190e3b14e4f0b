"""Checkpoints: any number of ranks and stage to any other, exactly; failures leave the old one."""

from __future__ import annotations

import itertools
import os
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import Free, assert_equal, mlp, mlp_loss, shard
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

STAGES = (0, 1, 2, 3)
# The matrix


def _save_all(rank: int, world: int, folder: str) -> None:
    for stage in STAGES:
        model, opt = make(stage)
        train(model, opt, rank, range(3))
        zero.save(f"{folder}/{world}-{stage}", model, opt, extra={"world": world})
        values = whole(model, opt)
        if rank == 0:
            torch.save(values, f"{folder}/{world}-{stage}.pt")


def _load_all(rank: int, world: int, folder: str) -> None:
    for saved_world, saved_stage, stage in itertools.product((1, 2, 3, 4), STAGES, STAGES):
        where = f"{saved_world} ranks, stage {saved_stage} -> {world} ranks, stage {stage}"
        model, opt = make(stage, seed=1)
        if saved_stage == stage:  # what was there before must go
            train(model, opt, rank, range(5, 6))
        path = f"{folder}/{saved_world}-{saved_stage}"
        assert zero.load(path, model, opt) == {"world": saved_world}
        want = torch.load(path + ".pt")
        got = whole(model, opt)
        assert got.keys() == want.keys(), where
        for name, value in want.items():
            assert torch.equal(got[name], value), f"{where}: {name}"
        if saved_stage == (stage + world) % 4:  # and on, like one that never stopped
            other, other_opt = make(stage, seed=2)
            zero.load_state_dict(
                other, {n: want[n] for n in model.state_dict() if n in want}, strict=False
            )
            state = opt.state_dict()
            zero.load_state_dict(other_opt, state)
            for net, optimizer in ((model, opt), (other, other_opt)):
                train(net, optimizer, rank, range(3, 6))
            assert_equal(whole(model, opt), whole(other, other_opt))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("checkpoints"))
    for world in (1, 2, 3, 4):
        run(_save_all, world, folder)
    return folder


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_any_ranks_and_stage_to_any_other(world: int, saved: str) -> None:
    run(_load_all, world, saved, limit_s=300.0)


# A run that was stopped goes on bit for bit


@in_folder
def _goes_on(rank: int, world: int, stage: int, folder: str) -> None:
    settings: list[dict[str, Any]] = [
        {},
        {"rule": "sgd", "momentum": 0.9},
        {"rule": "lion"},
        {"rule": torch.optim.RMSprop},
        {"rule": torch.optim.NAdam},
        {"param_dtype": torch.bfloat16},
        {"param_dtype": torch.bfloat16, "rule": torch.optim.Adagrad},
    ]
    for at, given in enumerate(settings):
        alone, alone_opt = make(stage, **given)
        train(alone, alone_opt, rank, range(5))
        model, opt = make(stage, **given)
        train(model, opt, rank, range(3))
        zero.save(f"{folder}/{at}", model, opt)
        fresh, fresh_opt = make(stage, seed=1, **given)
        zero.load(f"{folder}/{at}", fresh, fresh_opt)
        train(fresh, fresh_opt, rank, range(3, 5))
        assert_equal(whole(fresh, fresh_opt), whole(alone, alone_opt))
        assert_equal(
            zero.state_dict(fresh, rank0_only=False), zero.state_dict(alone, rank0_only=False)
        )


@pytest.mark.parametrize("world", [1, 3])
def test_e46_a_run_goes_on_bit_for_bit(world: int) -> None:
    run(at_each_stage, world, _goes_on, limit_s=240.0)


# Frozen, tied, odd parameters, and buffers


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.narrow = nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
        self.layer = nn.Linear(4, 4)
        self.same = self.layer
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.norm(self.layer(x)) @ self.turned
        return y * self.scalar + self.frozen.sum() + self.narrow.float().sum() + self.empty.sum()


@in_folder
def _odd(rank: int, world: int, stage: int, folder: str) -> None:

    def fresh_pair() -> tuple[nn.Module, zero.ZeroOptimizer]:
        torch.manual_seed(0)
        model = Odd()
        return model, zero.ZeroOptimizer(model, stage=stage, lr=0.1, min_unit_numel=0)

    model, opt = fresh_pair()
    for step in range(2):
        x = torch.linspace(-1, 1 + step + rank, 12).view(3, 4)
        model(x).square().mean().backward()
        opt.step()
        opt.zero_grad()
    zero.save(folder, model, opt)
    fresh, fresh_opt = fresh_pair()
    with zero.gathered(fresh, writeback=True), torch.no_grad():
        fresh.frozen.zero_()
        fresh.turned.zero_()
    zero.load(folder, fresh, fresh_opt)
    assert_equal(whole(fresh, fresh_opt), whole(model, opt))
    want, got = dict(model.named_buffers()), dict(fresh.named_buffers())
    others: list[Any] = [None] * world
    dist.all_gather_object(others, dict(want))
    for name, value in others[0].items():  # rank 0's
        if name != "scratch":
            assert torch.equal(got[name], value), name
    # Into a module that has the transposed parameter as an ordinary one.
    plain = Odd()
    plain.turned = nn.Parameter(torch.zeros(4, 3))
    other = zero.ZeroOptimizer(plain, stage=stage, lr=0.1)
    zero.load(folder, plain, other)
    assert torch.equal(zero.full_param(plain.turned), zero.full_param(model.turned))


def test_odd_parameters_and_buffers() -> None:
    run(at_each_stage, 2, _odd)


@in_folder
def _frozen_and_resumed(rank: int, world: int, stage: int, folder: str) -> None:
    """E52: state of a parameter that was trained, then frozen."""

    def fresh_pair() -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = Free(w=torch.zeros(()), v=torch.zeros(()))
        return model, zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0, momentum=0.9)

    model, opt = fresh_pair()
    for _ in range(2):
        (model.w + model.v).backward()
        opt.step()
        opt.zero_grad()
    model.w.requires_grad_(False)
    zero.save(folder, model, opt)
    fresh, fresh_opt = fresh_pair()
    fresh.w.requires_grad_(False)
    zero.load(folder, fresh, fresh_opt)
    fresh.w.requires_grad_(True)
    (fresh.w + fresh.v).backward()
    fresh_opt.step()
    torch.testing.assert_close(zero.full_param(fresh.w), torch.tensor(-5.61))
    torch.testing.assert_close(zero.full_state(fresh.w)["momentum_buffer"], torch.tensor(2.71))


@in_folder
def _step_counts(rank: int, world: int, stage: int, folder: str) -> None:
    """E53 and E56: counts of each parameter, also of those that live on one rank."""
    for rule in ("adam", torch.optim.Adam):

        def fresh_pair(rule: Any = rule) -> tuple[nn.Module, zero.ZeroOptimizer]:
            model = Free(p=torch.ones(()))
            return model, zero.ZeroOptimizer(model, rule, stage=stage, lr=0.1)

        model, opt = fresh_pair()
        for gradient in (1.0, -2.0, 3.0):
            (gradient * model.p).backward()
            opt.step()
            opt.zero_grad()
        zero.save(folder, model, opt)
        fresh, fresh_opt = fresh_pair()
        zero.load(folder, fresh, fresh_opt)
        assert int(zero.full_state(fresh.p)["step"]) == 3
        (-1.0 * fresh.p).backward()
        fresh_opt.step()
        torch.testing.assert_close(zero.full_param(fresh.p), torch.tensor(0.890139))


def test_e52_e53_e56_state_and_counts() -> None:
    run(at_each_stage, 2, _frozen_and_resumed, _step_counts)


# Schedulers, extra, random states, rotation


@in_folder
def _settings(rank: int, world: int, stage: int, folder: str) -> None:
    model = mlp()
    opt = shard(model, stage, lr=0.5)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
    for step in range(3):
        mlp_loss(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        torch.manual_seed(10 + rank + step)
        random.seed(20 + rank + step)
        extra = {"scheduler": scheduler.state_dict(), "best": float("inf"), "names": ["a", None]}
        zero.save(f"{folder}/step-{step}", model, opt, extra, keep_last=2)
    draws = torch.rand(3), random.random()
    if dist.is_initialized():
        dist.barrier()
    assert sorted(os.listdir(folder)) == ["step-1", "step-2"]
    assert zero.latest(folder) == f"{folder}/step-2"
    fresh = mlp(1)
    fresh_opt = shard(fresh, stage, lr=0.9)
    fresh_scheduler = torch.optim.lr_scheduler.StepLR(fresh_opt, 1, 0.5)
    group = fresh_opt.param_groups[0]
    loaded = zero.load(zero.latest(folder), fresh, fresh_opt)
    assert loaded["best"] == float("inf") and loaded["names"] == ["a", None]
    fresh_scheduler.load_state_dict(loaded["scheduler"])
    assert group is fresh_opt.param_groups[0] and group["lr"] == 0.5**4
    assert torch.equal(torch.rand(3), draws[0]) and random.random() == draws[1]
    fresh_scheduler.step()
    assert group["lr"] == 0.5**5
    with pytest.raises(TypeError, match=r"extra\['x'\]\[1\]"):
        zero.save(folder, model, opt, extra={"x": [1, object()]})
    with pytest.raises(ValueError, match="keep_last"):
        zero.save(f"{folder}/step-3", model, opt, keep_last=0)


@pytest.mark.parametrize("world", [1, 2])
def test_schedulers_extra_random_states_and_rotation(world: int) -> None:
    run(at_each_stage, world, _settings)
