"""Buffers that follow rank 0's, and layers that talk in forward and backward (E85)."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.nn.functional as collectives
from models import assert_gradients, shard
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.norm(self.a(x))) * self.scale
        if self.training:  # a new tensor, that backward needs
            self.mean = 0.5 * self.mean + 0.5 * y.detach().mean(0)
        return y * (1 + self.mean)


def _data(rank: int, step: int) -> torch.Tensor:
    return torch.linspace(-1, 1 + rank + step, 24).view(2, 4, 3)


def _two_forwards(net: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    data = _data(rank, step)
    return net(data[0]).square().mean() + net(data[1].sin()).square().mean()


def _buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.clone() for name, buffer in model.named_buffers()}


def _replace(model: nn.Module, values: dict[str, torch.Tensor]) -> None:
    """By new tensors, so that what autograd saved stays."""
    for prefix, part in model.named_modules():
        for key in part._buffers:
            part._buffers[key] = values[f"{prefix}.{key}" if prefix else key].clone()


def _follow_rank_0(rank: int, world: int, stage: int) -> None:
    """Each of two forwards starts at rank 0's buffers, and they are everyone's after the step."""
    torch.manual_seed(0)
    model = Buffered()
    ranks = [copy.deepcopy(model) for _ in range(world)]
    opt = shard(model, stage, sync_buffers=True)
    for step in range(3):
        losses = [net(_data(r, step)[0]).square().mean() for r, net in enumerate(ranks)]
        for net in ranks[1:]:
            _replace(net, _buffers(ranks[0]))
        for r, net in enumerate(ranks):
            (losses[r] + net(_data(r, step)[1].sin()).square().mean()).backward()
        parts = [[p.grad for p in net.parameters()] for net in ranks]
        want = [sum(grads) / world for grads in zip(*parts, strict=True)]
        names = [name for name, _ in model.named_parameters()]
        _two_forwards(model, rank, step).backward()
        assert_gradients(model, dict(zip(names, want, strict=True)))
        opt.step()
        opt.zero_grad()
        for net in ranks[1:]:
            _replace(net, _buffers(ranks[0]))
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, _buffers(ranks[0])[name], msg=f"{name}, {step}")
        for net in ranks:
            with torch.no_grad():
                for p, gradient in zip(net.parameters(), want, strict=True):
                    p -= 0.1 * gradient
                    p.grad = None
    everywhere = [None] * world
    dist.all_gather_object(everywhere, [b.tolist() for b in model.buffers()])
    assert all(other == everywhere[0] for other in everywhere)


def _only_where_it_must(rank: int, world: int, stage: int) -> None:
    """Not in evaluation, nor in no_sync, nor of a copy; and counted."""
    model = Buffered()
    opt = shard(model, stage, sync_buffers=True)
    size = sum(buffer.nbytes for buffer in model.buffers())

    def sent() -> int:
        counts = [None] * world
        dist.all_gather_object(counts, zero.report(opt).as_dict()["traffic"]["broadcast"])
        return sum(counts)

    model.eval()
    with torch.no_grad(), zero.gathered(model):
        if rank == 0:
            model(_data(0, 0)[0])
    model.train()
    with opt.no_sync():
        _two_forwards(model, rank).backward()
    assert sent() == 0
    opt.step()
    assert sent() == (world - 1) * size
    opt.zero_grad()
    _two_forwards(model, rank).backward()
    assert sent() == 3 * (world - 1) * size
    opt.step()
    if stage < 3 and rank == 0:
        copy.deepcopy(model)(_data(0, 0)[0])
    dist.barrier()


def _differ(rank: int, world: int, stage: int) -> None:
    model = Buffered()
    opt = shard(model, stage, sync_buffers=True, timeout=5.0)
    if rank == 1:
        model.register_buffer("more", torch.ones(2))
    with pytest.raises(RuntimeError, match=r"buffers \("):
        _two_forwards(model, rank)
    del opt


class OverRanks(nn.Module):
    """A batch norm over all ranks' batches, as torch's SyncBatchNorm (which CPUs don't have)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n = len(x) * dist.get_world_size()
        mean = collectives.all_reduce(x.sum(0)) / n
        variance = collectives.all_reduce((x - mean).square().sum(0)) / n
        return self.weight * (x - mean) / (variance + 1e-5).sqrt()


class Whole(OverRanks):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()


def _talks_in_forward_and_backward(rank: int, world: int, stage: int) -> None:
    def net(norm: type[nn.Module]) -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 6), norm(6), nn.Linear(6, 2))

    model, plain = net(OverRanks), net(Whole)
    opt = shard(model, stage)
    for step in range(2):
        data = torch.cat([_data(r, step).flatten(0, 1) for r in range(world)])
        plain.zero_grad()
        plain(data).square().mean().backward()
        model(_data(rank, step).flatten(0, 1)).square().mean().backward()
        for name, p in plain.named_parameters():
            got = zero.full_grad(dict(model.named_parameters())[name])
            torch.testing.assert_close(got, p.grad, rtol=1e-4, atol=1e-4, msg=name)
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad


@pytest.mark.parametrize("world", [1, 2, 3])
def test_e85_buffers_follow_rank_0(world: int) -> None:
    run(at_each_stage, world, _follow_rank_0)


def test_buffers_are_sent_only_in_training() -> None:
    run(at_each_stage, 2, _only_where_it_must)


def test_ranks_with_other_buffers_are_told() -> None:
    run(at_each_stage, 2, _differ)


def test_a_layer_that_reduces_over_ranks_itself() -> None:
    run(at_each_stage, 2, _talks_in_forward_and_backward)


def test_parameters_alone_have_no_buffers() -> None:
    with pytest.raises(TypeError, match="sync_buffers"):
        zero.ZeroOptimizer(nn.Linear(2, 2).parameters(), stage=1, sync_buffers=True)
