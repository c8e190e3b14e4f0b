"""Hybrid sharding: ranks that shard in rows of a grid and replicate in its columns."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_close, assert_equal, batch, loss_of, make_gpt, mlp, mlp_loss, weights
from ranks import at_each_stage, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_torch as zero

SMALL: dict[str, Any] = {"bucket_bytes": 8192, "first_bucket_bytes": 2048, "min_unit_numel": 0}
STEPS = 6


def _mine(rank: int, groups: list[list[int]]) -> Any:
    """The one of new groups that this rank is in."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        mine = group if rank in ranks else mine
    return mine


def _grid(rank: int, rows: list[list[int]]) -> dict[str, Any]:
    columns = [list(column) for column in zip(*rows, strict=True)]
    return {"shard_group": _mine(rank, rows), "replicate_group": _mine(rank, columns)}


def _grid_gradients(model: nn.Module, step: int, rows: list[list[int]]) -> list[torch.Tensor]:
    """Each rank's gradient by itself, summed along each row, then over the rows; the mean."""
    total: list[torch.Tensor] = []
    for row in rows:
        sums: list[torch.Tensor] = []
        for rank in row:
            model.zero_grad()
            loss_of(model, batch(step, rank)).backward()
            own = [p.grad.clone() for p in model.parameters()]
            sums = [a + b for a, b in zip(sums, own, strict=True)] if sums else own
        total = [a + b for a, b in zip(total, sums, strict=True)] if total else sums
    return [gradient / sum(map(len, rows)) for gradient in total]


def _train(rank: int, stage: int, ranks: dict[str, Any], check: Any = None) -> tuple[dict, list]:
    """Weights, and norms of the gradients, which `check` may look at."""
    model = make_gpt(seed=rank)  # rank 0's weights must win
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, timeout=30.0, **SMALL, **ranks)
    norms = []
    for step in range(STEPS):
        before = copy.deepcopy(model.state_dict()) if check else None
        loss_of(model, batch(step, rank)).backward()
        got = [zero.full_grad(p) for p in model.parameters()]
        norms.append(float(opt.clip_grad_norm_(0.5)))
        if check:
            check(step, before, got, norms[-1])
        opt.step()
        opt.zero_grad()
    return weights(model), norms


def _parity(rank: int, world: int, transport: str) -> None:
    rows = [[0, 1], [2, 3]]
    reference = make_gpt()
    plain = torch.optim.AdamW(reference.parameters(), lr=1e-2)

    def check(step: int, before: dict, got: list[torch.Tensor], norm: float) -> None:
        twin = make_gpt()
        twin.load_state_dict(before)
        want = _grid_gradients(twin, step, rows)
        for name, a, b in zip(dict(twin.named_parameters()), got, want, strict=True):
            assert torch.equal(a, b), f"step {step}: gradient of {name}"
        assert abs(norm - nn.utils.get_total_norm(want).item()) < 1e-5 * norm
        for p, gradient in zip(reference.parameters(), want, strict=True):
            p.grad = gradient
        nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        plain.step()

    grid = {**_grid(rank, rows), "transport": transport}
    first = None
    for stage in range(4):
        got = _train(rank, stage, grid, None if first else check)
        first = first or got
        assert_equal(got[0], first[0])
        assert got[1] == first[1]
    assert_close(first[0], weights(reference), rtol=1e-4, atol=1e-4)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, first)
    for other in everyone:
        assert_equal(other[0], first[0])
        assert other[1] == first[1]


@pytest.mark.parametrize("transport", ["auto", "group"])
def test_a_grid_gives_one_process_s_bits_in_the_stated_order(transport: str) -> None:
    run(_parity, 4, transport)


def _even() -> nn.Module:
    """Nothing of it is padding on a grid of 2 x 2."""
    return nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 64))


def _ledger(rank: int, world: int, stage: int) -> None:
    grid = _grid(rank, [[0, 1], [2, 3]])
    for dtype in (torch.float32, torch.bfloat16):
        model = _even()
        psi = sum(p.numel() for p in model.parameters())
        opt = zero.ZeroOptimizer(
            model, stage=stage, lr=0.1, param_dtype=dtype, reshard_after_forward=False, **grid
        )
        for _ in range(3):
            model(torch.ones(2, 16, dtype=dtype)).sum().backward()
            opt.step()
            opt.zero_grad()
        opt.synchronize()
        report = zero.report(opt)
        numbers = report.as_dict()
        groups = numbers["groups"]
        # Half of the gradients to the other shard, and half of the weights back; of a shard's
        # sums, in fp32, half to the other replica and half back.
        each_way = 3 * psi * dtype.itemsize // 2
        across = 3 * 2 * (4 * psi // 2) // 2
        none = {"reduce_scatter": 0, "all_gather": 0, "all_reduce": 0, "broadcast": 0}
        if stage == 0:
            shard = {**none, "all_reduce": 2 * each_way}
        else:
            shard = {**none, "reduce_scatter": each_way, "all_gather": each_way}
        assert groups["shard"] == shard
        assert groups["replicate"] == {**none, "all_reduce": across}
        for kind, sent in numbers["traffic"].items():
            assert sent == groups["shard"][kind] + groups["replicate"][kind], kind
        assert 3 * groups["theory"]["shard"] == 2 * each_way
        assert 3 * groups["theory"]["replicate"] == across
        assert 3 * numbers["theory"]["traffic"] == 2 * each_way + across
        for kind in ("parameters", "optimizer_state"):
            assert numbers["held"][kind] == numbers["theory"]["held"][kind], kind
        assert numbers["held"]["parameters"] == psi * dtype.itemsize // (2 if stage == 3 else 1)
        assert "between replicas" in str(report)
        assert "rank " + str(rank) + " of 4" in str(report)


def test_traffic_of_each_group_equals_theory() -> None:
    run(at_each_stage, 4, _ledger)


def _meshes(rank: int, world: int) -> None:
    rows = [[0, 1], [2, 3]]
    grid = _grid(rank, rows)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    cube = init_device_mesh("cpu", (1, 2, 2), mesh_dim_names=("a", "b", "c"))
    flat = init_device_mesh("cpu", (4,))
    for stage in (1, 3):
        want = _train(rank, stage, grid)
        assert_equal(_train(rank, stage, {"process_group": mesh})[0], want[0])
        assert_equal(_train(rank, stage, {"process_group": cube["b", "c"]})[0], want[0])
        pair = {"shard_group": mesh["shard"], "replicate_group": mesh["replicate"]}
        assert_equal(_train(rank, stage, pair)[0], want[0])
        plain = _train(rank, stage, {})
        assert_equal(_train(rank, stage, {"process_group": flat})[0], plain[0])
        row = _train(rank, stage, {"process_group": mesh["shard"]})
        assert_equal(row[0], _train(rank, stage, {"process_group": grid["shard_group"]})[0])
    opt = zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, process_group=mesh)
    assert (opt._engine.rank, opt._engine.world_size) == (rank, 4)
    assert "groups" in zero.report(opt).as_dict()
    wrapped = zero.ZeroModule(nn.Linear(8, 4, bias=False), stage=3, process_group=mesh)
    assert zero.report(wrapped).as_dict()["held"]["parameters"] == 4 * 32 // 2
    assert "groups" not in zero.report(zero.ZeroOptimizer(nn.Linear(2, 2), stage=1)).as_dict()
    with pytest.raises(ValueError, match=r"process_group to be a DeviceMesh of one or two dim.*3"):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, process_group=cube)
    with pytest.raises(ValueError, match=r"shard_group to be a DeviceMesh of one dim.*got 2"):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, shard_group=mesh, replicate_group=flat)
    with pytest.raises(ValueError, match="DeviceMesh as process_group, got both"):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, process_group=mesh, **grid)


def test_device_meshes_of_one_and_two_dimensions() -> None:
    run(_meshes, 4, limit_s=120)


def _refuse(words: str, **groups: Any) -> None:
    with pytest.raises(ValueError, match=words):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, timeout=20.0, **groups)


def _refusals(rank: int, world: int) -> None:
    rows, columns = _mine(rank, [[0, 1], [2, 3]]), _mine(rank, [[0, 2], [1, 3]])
    crossed = _mine(rank, [[0, 3], [1, 2]])
    alone = _mine(rank, [[r] for r in range(4)])
    pairs = {(a, b): dist.new_group([a, b]) for a, b in ((0, 1), (1, 2), (2, 3), (0, 3))}
    overlapping = pairs[((0, 1), (1, 2), (2, 3), (0, 3))[rank]]
    trio = _mine(rank, [[0, 1, 2], [3]])
    grid = "rows and columns of one grid of all 4 ranks"
    _refuse(f"{grid}.*are number", shard_group=rows, replicate_group=crossed)
    _refuse(f"{grid}.*share", shard_group=rows, replicate_group=rows)
    _refuse(f"{grid}.*groups of 2 and of 1", shard_group=rows, replicate_group=alone)
    _refuse(f"{grid}.*which is in it, gave", shard_group=overlapping, replicate_group=columns)
    _refuse(f"{grid}.*3 ranks on rank 0 and 1 on rank 3", shard_group=trio, replicate_group=columns)
    _refuse(f"{grid}.*rank 0 gave none as replicate_group", shard_group=rows)
    _refuse(f"{grid}.*rank 0 gave none as shard_group", replicate_group=columns)
    first = dist.new_group([0, 1])  # on ranks 2 and 3, what says that they are not in it
    _refuse(
        f"{grid}.*rank 2 gave a group that it is not in", shard_group=first, replicate_group=columns
    )
    if rank < 2:
        words = "has rank 2, which is not in process_group"
        _refuse(words, shard_group=rows, replicate_group=columns, process_group=first)
    for name in ("shard_group", "replicate_group"):
        other = {"shard_group": rows, "replicate_group": columns, name: "inner"}
        with pytest.raises(TypeError, match=f"{name}.*'inner'"):
            zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, **other)
    opt = zero.ZeroOptimizer(  # the communication is where it was
        nn.Linear(2, 2), stage=1, shard_group=rows, replicate_group=columns
    )
    assert opt._engine.world_size == 4


def test_groups_that_are_no_grid_are_refused_on_all_ranks() -> None:
    run(_refusals, 4)


def _accumulation(rank: int, world: int, stage: int) -> None:
    """The gradient is the mean over all four ranks of the sum of the micro-batches."""
    grid = _grid(rank, [[0, 1], [2, 3]])
    for pattern in ((False, True), (True, True), (True, False)):
        model, plain = mlp(), mlp()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, **SMALL, **grid)
        for micro, sync in enumerate(pattern):
            if sync:
                mlp_loss(model, rank, micro).backward()
            else:
                with opt.no_sync():
                    mlp_loss(model, rank, micro).backward()
        total = [torch.zeros_like(p) for p in plain.parameters()]
        for other in range(world):
            for micro in range(len(pattern)):
                plain.zero_grad()
                mlp_loss(plain, other, micro).backward()
                for own, p in zip(total, plain.parameters(), strict=True):
                    own += p.grad / world
        opt.synchronize()
        for p, want in zip(model.parameters(), total, strict=True):
            torch.testing.assert_close(zero.full_grad(p), want, rtol=1e-5, atol=1e-6)
        norm = opt.grad_norm()
        torch.testing.assert_close(norm, nn.utils.get_total_norm(total), rtol=1e-5, atol=1e-6)


def _life(rank: int, world: int, stage: int) -> None:
    """State dicts, writing to whole weights, and going on from a saved state."""
    grid = _grid(rank, [[0, 1], [2, 3]])
    model = mlp(seed=rank)
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.01, **SMALL, **grid)

    def step(model: nn.Module, opt: Any, at: int) -> None:
        mlp_loss(model, rank, at).backward()
        opt.step()
        opt.zero_grad()

    step(model, opt, 0)
    with zero.gathered(model, writeback=True), torch.no_grad():
        model[0].weight.fill_(float(rank + 1))  # rank 0's ones reach all
    assert torch.equal(zero.full_param(model[0].weight), torch.ones(19, 5))
    saved, state = copy.deepcopy((zero.state_dict(model), zero.optimizer_state_dict(opt)))
    assert bool(saved) == (rank == 0) == bool(state)
    step(model, opt, 1)
    want = weights(model)
    other = mlp(seed=9)
    again = zero.ZeroOptimizer(other, stage=stage, lr=0.01, **SMALL, **grid)
    zero.load_state_dict(other, saved)
    zero.load_state_dict(again, state)
    step(other, again, 1)
    assert_equal(weights(other), want)
    assert zero.full_state(other[0].weight)["exp_avg"].shape == (19, 5)


def _scaler(rank: int, world: int, stage: int) -> None:
    """An overflow on one rank is everyone's."""
    model = mlp()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, **SMALL, **_grid(rank, [[0, 1], [2, 3]]))
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = weights(model)
    scaler.scale(mlp_loss(model, rank) * (float("inf") if rank == 3 else 1.0)).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert scaler.get_scale() == 512.0
    assert_equal(weights(model), before)
    scaler.scale(mlp_loss(model, rank)).backward()
    scaler.step(opt)
    assert not torch.equal(weights(model)["0.weight"], before["0.weight"])


def test_what_training_needs_works_over_a_grid() -> None:
    run(at_each_stage, 4, _accumulation, _life, _scaler, limit_s=120)


class _OwnError(Exception):
    pass


class _Raises:
    """Makes a block raise, in forward or in backward, while it is armed."""

    def __init__(self, module: nn.Module, where: str) -> None:
        self.armed = False
        self._where = where
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if self.armed and self._where == "forward":
            raise _OwnError
        if self.armed and output.requires_grad:
            output.register_hook(self._raise)

    def _raise(self, gradient: torch.Tensor) -> None:
        raise _OwnError


def _with_failures(
    rank: int, stage: int, where: str, grid: dict, bad: Callable[[int], bool]
) -> dict[str, torch.Tensor]:
    """Four steps; on the ranks that are `bad`, two attempts fail, and the others learn of it."""
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, timeout=20.0, **SMALL, **grid)
    raises = _Raises(model.blocks[1], where)
    errors: list[Exception] = []
    done = attempt = 0
    while done < 4:
        raises.armed = bad(rank) and attempt in (1, 3)
        attempt += 1
        assert attempt < 10
        try:
            loss_of(model, batch(done, rank)).backward()
            opt.step()
            done += 1
        except (_OwnError, RuntimeError) as error:
            errors.append(error)
        opt.zero_grad()
    raises.armed = False
    for error in errors:
        told = f"its {where} was left by an exception" in str(error)
        assert told or isinstance(error, _OwnError) or "ranks disagree" in str(error), error
    return weights(model)


def _goes_on(rank: int, world: int) -> None:
    grid = _grid(rank, [[0, 1], [2, 3]])
    for stage, where in ((0, "backward"), (2, "backward"), (3, "backward"), (3, "forward")):
        want = _with_failures(rank, stage, where, grid, lambda rank: False)
        for ranks in ([3], [0, 1], [1, 3], [0, 1, 2, 3]):
            got = _with_failures(rank, stage, where, grid, lambda r, ranks=ranks: r in ranks)
            assert_equal(got, want)


def test_training_goes_on_after_errors_on_some_ranks() -> None:
    run(_goes_on, 4, limit_s=150)


def _dies(rank: int, world: int, transport: str) -> None:
    grid = _grid(rank, [[0, 1], [2, 3]])
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=2, lr=0.1, timeout=30.0, transport=transport, **grid)
    if rank == 3:
        os._exit(3)
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="of all 4") as caught:
        loss_of(model, batch(0, rank)).backward()
    assert time.monotonic() - began < 15.0
    with pytest.raises(RuntimeError):
        opt.step()
    raise RuntimeError(f"as it should be: {caught.value}")


@pytest.mark.parametrize("transport", ["host", "group"])
def test_all_ranks_learn_of_one_that_died(transport: str) -> None:
    """Also the one that shares no group with it."""
    with pytest.raises(pytest.fail.Exception) as caught:
        run(_dies, 4, transport, limit_s=60)
    for rank in range(3):
        assert f"rank {rank}: " in str(caught.value)
    assert str(caught.value).count("RuntimeError: as it should be: ") == 3, caught.value
