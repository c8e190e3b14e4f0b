"""Training features that meet: joins, comm hooks, hybrid sharding, buffers, averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import assert_close, assert_equal, batch, loss_of, make_gpt, mlp, mlp_loss, shard
from ranks import at_each_stage, run
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zero_torch as zero

SMALL: dict[str, Any] = {"bucket_bytes": 4096, "first_bucket_bytes": 1024, "min_unit_numel": 0}


def _whole(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: zero.full_param(p) for name, p in model.named_parameters()}


def _same_everywhere(values: dict[str, torch.Tensor], world: int) -> None:
    everywhere: list[Any] = [None] * world
    dist.all_gather_object(everywhere, values)
    for other in everywhere:
        assert_equal(other, values)


# Joins


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


def _join_with_buffers(rank: int, world: int, stage: int) -> None:
    """Buffers follow the first rank that still trains."""
    model, plain = _net(), _net()
    opt = shard(model, stage, sync_buffers=True, lr=0.0)
    with zero.join(opt):
        for step in range([1, 3][rank]):
            mlp_loss(model, rank, step).backward()
            opt.step()
            opt.zero_grad()
    for step, first in enumerate((0, 1, 1)):
        mlp_loss(plain, first, step)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    assert_close(buffers, dict(plain.named_buffers()))
    _same_everywhere({**buffers, **_whole(model)}, world)


def _join_with_tokens(rank: int, world: int, stage: int) -> None:
    """The mean over the tokens of those that still have some."""
    model = nn.Linear(2, 1, bias=False)
    nn.init.ones_(model.weight)
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0, average=False)
    tokens = [[[1.0, 3.0]], [[2.0], [6.0, 8.0]]][rank]
    with zero.join(opt):
        for mine in tokens:
            model(torch.tensor(mine)[:, None].expand(-1, 2)).sum().backward()
            opt.divide_grad_(len(mine), across_ranks=True)
            opt.step()
            opt.zero_grad()
    assert torch.equal(zero.full_param(model.weight), torch.full((1, 2), 1.0 - 2.0 - 7.0))


def _join_with_hook(rank: int, world: int, stage: int) -> None:
    """bf16 on the wire, and the mean over those that contribute, bit for bit."""
    model, plain = mlp(), mlp()
    opt = shard(model, stage)
    opt.register_comm_hook("bf16")
    with zero.join(opt):
        for step in range([3, 1][rank]):
            mlp_loss(model, rank, step).backward()
            opt.step()
            opt.zero_grad()
    with torch.no_grad():
        for step in range(3):
            total: list[torch.Tensor] = []
            ranks = [0, 1] if step == 0 else [0]
            for r in ranks:
                plain.zero_grad()
                with torch.enable_grad():
                    mlp_loss(plain, r, step).backward()
                own = [p.grad.bfloat16().float() for p in plain.parameters()]
                total = [a + b for a, b in zip(total, own, strict=True)] if total else own
            for p, gradient in zip(plain.parameters(), total, strict=True):
                p -= 0.1 * (gradient / len(ranks))
    assert_close(_whole(model), {n: p.detach() for n, p in plain.named_parameters()})


def _join_refuses_averages(rank: int, world: int, stage: int) -> None:
    opt = shard(mlp(), stage)
    ema = zero.EMA(opt)
    with pytest.raises(NotImplementedError, match="join"), zero.join(opt):
        ema.update()
    dist.barrier()


def test_joins_meet_other_features() -> None:
    run(at_each_stage, 2, _join_with_buffers, _join_with_tokens, _join_with_hook)


def test_averages_inside_a_join_are_refused() -> None:
    run(at_each_stage, 1, _join_refuses_averages)


# Hybrid sharding


def _hybrid(rank: int, world: int, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def train(**settings: Any) -> tuple[nn.Module, zero.ZeroOptimizer, zero.EMA]:
        hook, rule = settings.pop("hook", None), settings.pop("rule", "adamw")
        model = make_gpt()
        opt = zero.ZeroOptimizer(
            model, rule, stage=stage, lr=1e-2, process_group=mesh, timeout=30.0, **SMALL, **settings
        )
        if hook is not None:
            opt.register_comm_hook(hook)
        ema = zero.EMA(opt, 0.5)
        for step in range(3):
            loss_of(model, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
            ema.update()
        return model, opt, ema

    model, _, ema = train()
    want = _whole(model)
    _same_everywhere(want, world)
    average = {name: ema.average(p) for name, p in model.named_parameters()}
    _same_everywhere(average, world)
    with ema.swapped():
        _same_everywhere(zero.state_dict(model, rank0_only=False), world)
    assert_equal(_whole(model), want)
    state = ema.state_dict()
    assert bool(state) == (rank == 0)
    again = zero.EMA(model)
    again.load_state_dict(state)
    assert_equal({name: again.average(p) for name, p in model.named_parameters()}, average)

    in_backward, _, _ = train(step_in_backward=True)
    assert_equal(_whole(in_backward), want)

    hooked, _, _ = train(hook="bf16")
    _same_everywhere(_whole(hooked), world)

    # A hook of one's own reduces over all ranks, by a group of its own.
    group = dist.new_group(list(range(world)))

    def mean(bucket: zero.GradientBucket) -> torch.Tensor:
        dist.all_reduce(bucket.gradients, group=group)
        return bucket.gradients / bucket.world_size

    by_hand, _, _ = train(hook=mean, rule="sgd")
    plain, _, _ = train(rule="sgd")
    _same_everywhere(_whole(by_hand), world)
    assert_close(_whole(by_hand), _whole(plain))


def _hybrid_gradients(rank: int, world: int, stage: int) -> None:
    """Of hooks and divisors, by arithmetic: small integers, which are exact in any order."""
    mesh = init_device_mesh("cpu", (2, 2))
    for hook, divide in ((None, False), ("bf16", False), ("fp16", False), (None, True)):
        model = nn.Linear(8, 16, bias=False)
        opt = zero.ZeroOptimizer(
            model, "sgd", stage=stage, lr=1.0, process_group=mesh, average=not divide
        )
        opt.register_comm_hook(hook)
        x = torch.arange(8.0) * (rank + 1)
        for _ in range(2):
            model(x).sum().backward()
        if divide:
            assert opt.divide_grad_(rank, across_ranks=True) == 6
        per_rank = torch.arange(8.0) * 2 * 10
        want = (per_rank / (6 if divide else 4)).expand(16, 8)
        assert torch.equal(zero.full_grad(model.weight), want), (hook, divide)


def test_hybrid_sharding_meets_other_features() -> None:
    run(at_each_stage, 4, _hybrid, _hybrid_gradients, limit_s=240.0)


# Stepping in backward


def _stepping_with_buffers_and_averages(rank: int, world: int, stage: int) -> None:
    runs = []
    for in_backward in (False, True):
        model = _net()
        opt = shard(model, stage, sync_buffers=True, step_in_backward=in_backward)
        ema = zero.EMA(opt, 0.5)
        for step in range(4):
            mlp_loss(model, rank, step).backward()
            opt.step()
            ema.update()
            opt.zero_grad()
        averages = {name: ema.average(p) for name, p in model.named_parameters()}
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        _same_everywhere(buffers, world)
        runs.append((_whole(model), averages))
        if in_backward:
            with pytest.raises(RuntimeError, match="step_in_backward"):
                opt.divide_grad_(2.0)
            with ema.swapped(), pytest.raises(RuntimeError, match="averages"):
                mlp_loss(model, rank).backward()
            opt.zero_grad()
            assert_equal(_whole(model), runs[1][0])
    assert_equal(runs[0][0], runs[1][0])
    assert_equal(runs[0][1], runs[1][1])


def test_stepping_in_backward_meets_other_features() -> None:
    run(at_each_stage, 2, _stepping_with_buffers_and_averages)
