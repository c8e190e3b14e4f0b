"""State dicts of what each rank holds (full=False): no communication, an exact round trip."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import assert_equal, make_gpt
from ranks import at_each_stage, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_torch as zero

SETTINGS: list[dict[str, Any]] = [
    {"rule": "sgd", "momentum": 0.9},
    {"rule": torch.optim.NAdam},
    {"param_dtype": torch.bfloat16},
    {"param_dtype": torch.bfloat16, "rule": torch.optim.Adagrad},
]


@in_folder
def _goes_on(rank: int, world: int, stage: int, folder: str) -> None:
    """Saved by torch.save, loaded with weights_only=True; then bit for bit the same run."""
    for at, given in enumerate(SETTINGS):
        alone, alone_opt = make(stage, **given)
        train(alone, alone_opt, rank, range(4))
        model, opt = make(stage, **given)
        train(model, opt, rank, range(2))
        torch.save(
            (zero.state_dict(model, full=False), zero.optimizer_state_dict(opt, full=False)),
            f"{folder}/{at}-{rank}",
        )
        before = whole(model, opt)
        train(model, opt, rank, range(2, 4))  # does not change what was taken
        loaded, loaded_opt = torch.load(f"{folder}/{at}-{rank}", weights_only=True)
        fresh, fresh_opt = make(stage, seed=1, **given)
        group = fresh_opt.param_groups[0]
        zero.load_state_dict(fresh, loaded, full=False)
        zero.load_state_dict(fresh_opt, loaded_opt, full=False)
        assert fresh_opt.param_groups[0] is group
        assert_equal(whole(fresh, fresh_opt), before)
        train(fresh, fresh_opt, rank, range(2, 4))
        assert_equal(whole(fresh, fresh_opt), whole(alone, alone_opt))
        assert_equal(
            zero.state_dict(fresh, rank0_only=False), zero.state_dict(alone, rank0_only=False)
        )


@pytest.mark.parametrize("world", [1, 2, 3])
def test_a_run_goes_on_bit_for_bit(world: int) -> None:
    run(at_each_stage, world, _goes_on, limit_s=240.0)


def _over_replicas(rank: int, world: int) -> None:
    """Hybrid sharding: each of two replicas is sharded in itself."""
    mesh = init_device_mesh("cpu", (2, 2))
    for stage, given in ((1, {"param_dtype": torch.bfloat16}), (3, {"rule": torch.optim.NAdam})):
        model, opt = make(stage, process_group=mesh, **given)
        train(model, opt, rank, range(1))
        fresh, fresh_opt = make(stage, seed=1, process_group=mesh, **given)
        zero.load_state_dict(fresh, zero.state_dict(model, full=False), full=False)
        held = zero.optimizer_state_dict(opt, full=False)
        zero.load_state_dict(fresh_opt, held, full=False)
        for net, optimizer in ((model, opt), (fresh, fresh_opt)):
            train(net, optimizer, rank, range(1, 2))
        assert_equal(whole(fresh, fresh_opt), whole(model, opt))


def test_replicas_each_hold_the_whole() -> None:
    run(_over_replicas, 4)


class Mixed(nn.Module):
    """What is not sharded, and parameters that are odd."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.tied = self.layer
        self.turned = nn.Parameter(torch.arange(12.0).view(3, 4).t())
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.arange(5.0), requires_grad=False)
        self.register_buffer("count", torch.tensor(0))
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        y = self.norm(self.layer(x + self.frozen))
        return (y @ self.turned.t()[:, :3]).sum() * self.scalar + self.empty.sum()


def _mixed(stage: int) -> tuple[Mixed, zero.ZeroOptimizer]:
    torch.manual_seed(0)
    model = Mixed()
    return model, zero.ZeroOptimizer(model, stage=stage, lr=0.1, min_unit_numel=0, timeout=20.0)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """Elements in the order of memory, of a tensor that may be turned."""
    order = sorted(range(tensor.dim()), key=lambda axis: -tensor.stride(axis))
    return tensor.permute(order).reshape(-1)


@in_folder
def _runs(rank: int, world: int, stage: int, folder: str) -> None:
    """The ranks' runs, one behind the other, are the whole in its order in memory."""
    model, opt = _mixed(stage)
    for step in range(2):
        model(torch.linspace(-1, 1 + step + rank, 20).view(4, 5)).backward()
        opt.step()
        opt.zero_grad()
    mine = zero.state_dict(model, full=False)
    mine_opt = zero.optimizer_state_dict(opt, full=False)
    want = zero.state_dict(model, rank0_only=False)
    want_opt = opt.state_dict()
    assert list(mine) == list(want) == list(Mixed().state_dict())
    assert mine_opt["param_groups"] == want_opt["param_groups"]
    assert mine_opt["state"].keys() == want_opt["state"].keys()
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (dict(mine), mine_opt["state"]))
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for name, value in want.items():
        if stage == 3 and name in parameters:
            parts = [of_rank[name] for of_rank, _ in everyone]
            assert all(part.dim() == 1 for part in parts)
            assert torch.equal(torch.cat(parts), _flat(value)), name
        else:
            assert torch.equal(mine[name], value), name
    for index, state in want_opt["state"].items():
        for key, value in state.items():
            parts = [states[index][key] for _, states in everyone]
            if stage == 0 or key == "step":
                assert torch.equal(parts[rank], value)
            else:
                assert torch.equal(torch.cat(parts), _flat(value)), (index, key)
    assert torch.equal(mine["layer.weight"], mine["tied.weight"])
    with torch.no_grad():
        model.count.add_(5)
    fresh, fresh_opt = _mixed(stage)
    zero.load_state_dict(fresh, mine, full=False)
    zero.load_state_dict(fresh_opt, mine_opt, full=False)
    assert_equal(zero.state_dict(fresh, rank0_only=False), {**want, "count": torch.tensor(7)})
    assert_equal(whole(fresh, fresh_opt), whole(model, opt))


def test_runs_of_elements_are_the_whole() -> None:
    run(at_each_stage, 3, _runs)


@in_folder
def _alone(rank: int, world: int, stage: int, folder: str) -> None:
    """Rank 0 takes its own while rank 1 is not there."""
    for given in ({}, {"rule": torch.optim.RMSprop, "param_dtype": torch.bfloat16}):
        model, opt = make(stage, **given)
        train(model, opt, rank, range(1))
        if rank == 0:
            zero.state_dict(model, full=False)
            zero.optimizer_state_dict(opt, full=False)
        else:
            time.sleep(0.5)
        train(model, opt, rank, range(1, 2))


@in_folder
def _refused(rank: int, world: int, stage: int, folder: str) -> None:
    """What does not fit one rank is refused on all, before anything is changed."""
    model, opt = make(stage)
    train(model, opt, rank, range(1))
    mine = zero.state_dict(model, full=False)
    mine_opt = zero.optimizer_state_dict(opt, full=False)
    other, other_opt = make((stage + 1) % 4, seed=1)
    train(other, other_opt, rank, range(1))
    before = whole(other, other_opt)
    remedy = r"same number of ranks, stage and layout.*zero\.save"
    for target, state in ((other, mine), (other_opt, mine_opt)):
        for given in (state, dict(state)):
            if given is not state and not _shapes_differ(stage, target is other):
                continue
            with pytest.raises((ValueError, RuntimeError), match=remedy):
                zero.load_state_dict(target, given, full=False)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, (mine, mine_opt))
    swapped, swapped_opt = everyone[1 - rank]
    with pytest.raises((ValueError, RuntimeError), match=f"rank {rank} of 2.*rank {1 - rank} of 2"):
        zero.load_state_dict(model, swapped, full=False)
    with pytest.raises((ValueError, RuntimeError), match=remedy):
        zero.load_state_dict(opt, swapped_opt, full=False)
    bad, bad_opt = dict(mine), zero.optimizer_state_dict(opt, full=False)
    if rank == 1:  # on one rank only
        bad["norm.weight"] = torch.zeros(1)
        bad_opt["state"][0]["exp_avg"] = torch.zeros(1)
    with pytest.raises((ValueError, RuntimeError), match=f"'norm.weight'.*{remedy}"):
        zero.load_state_dict(model, bad, full=False)
    with pytest.raises((ValueError, RuntimeError), match=f"'tokens.weight'.*exp_avg.*{remedy}"):
        zero.load_state_dict(opt, bad_opt, full=False)
    lacking = {k: v for k, v in zero.state_dict(model, full=False).items() if k != "norm.bias"}
    with pytest.raises(RuntimeError, match=r"norm\.bias"):
        zero.load_state_dict(model, lacking if rank == 0 else dict(mine), full=False)
    with pytest.raises((TypeError, RuntimeError), match="expected state_dict to be a dict"):
        zero.load_state_dict(model, None, full=False)
    assert_equal(whole(other, other_opt), before)
    zero.load_state_dict(model, lacking, full=False, strict=False)
    train(model, opt, rank, range(1, 2))
    train(other, other_opt, rank, range(1, 2))


def _shapes_differ(stage: int, of_model: bool) -> bool:
    """Whether shapes at this stage and the next are others, where the mark is lost."""
    return stage >= 2 if of_model else stage in (0, 3)


def test_it_is_local_and_refused_where_it_does_not_fit() -> None:
    run(at_each_stage, 2, _alone, _refused)


def _unfrozen_later(rank: int, world: int, stage: int) -> None:
    """State of a parameter that was trained and then frozen comes back, whatever the rule."""
    for rule in ("adam", torch.optim.Adam):
        model, opt = make(stage, rule)
        train(model, opt, rank, range(2))
        mine = zero.optimizer_state_dict(opt, full=False)
        fresh = make_gpt(1)
        fresh.norm.requires_grad_(False)
        fresh_opt = zero.ZeroOptimizer(fresh, rule, stage=stage, lr=0.1, min_unit_numel=0)
        if stage in (1, 2, 3) and world > 1:  # what is frozen at wrap lies elsewhere
            with pytest.raises((ValueError, RuntimeError), match="layout"):
                zero.load_state_dict(fresh_opt, mine, full=False)
            continue
        zero.load_state_dict(fresh_opt, mine, full=False)
        want, got = opt.state_dict()["state"], fresh_opt.state_dict()["state"]
        for index, key in itertools.product(want, ("exp_avg", "exp_avg_sq", "step")):
            assert torch.equal(got[index][key], want[index][key]), (index, key)


def test_state_of_a_frozen_parameter() -> None:
    run(at_each_stage, 2, _unfrozen_later)


def test_a_plain_model() -> None:
    model, other = make_gpt(0), make_gpt(1)
    zero.load_state_dict(other, zero.state_dict(model, full=False), full=False)
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
