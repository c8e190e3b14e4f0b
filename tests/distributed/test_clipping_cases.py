"""Clipping and norms, at stages 0 to 3 (E07 and more)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from models import Free, mlp, mlp_loss, poison, shard
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

INF, NAN = float("inf"), float("nan")


def _infinity(rank: int, world: int, stage: int) -> None:
    """The largest elements lie in different ranks' shards."""
    model = Free(w=torch.zeros(64))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
    factor = torch.zeros(64)
    factor[0], factor[63] = 3.0, -4.0
    (model.w * factor).sum().backward()
    assert float(opt.clip_grad_norm_(1.0, INF)) == 4.0
    got = zero.full_grad(model.w)
    torch.testing.assert_close(got, factor / 4, rtol=1e-6, atol=1e-6)


def _refused(action: Callable[[], object], *words: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        action()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _error_if_nonfinite(rank: int, world: int, stage: int) -> None:
    for bad, kind in itertools.product((INF, NAN), (1.0, 2.0, 3.0, INF)):
        model = mlp()
        opt = shard(model, stage)
        handles = [poison(p, 0, bad if rank == 1 else 0.0) for p in (model[3].bias, model[2].bias)]
        mlp_loss(model, rank).backward()
        for handle in handles:
            handle.remove()
        before = zero.full_grad(model[0].weight)
        _refused(
            lambda k=kind: opt.clip_grad_norm_(1e-3, k, error_if_nonfinite=True),
            "'2.bias'",
            "error_if_nonfinite",
            "of 2",
            "nan" if math.isnan(bad) else "inf",
        )
        assert torch.equal(zero.full_grad(model[0].weight), before)
        assert not math.isfinite(opt.clip_grad_norm_(1e-3, kind))
        opt.zero_grad()
        mlp_loss(model, rank).backward()
        assert 0 < opt.clip_grad_norm_(1e-3, kind, error_if_nonfinite=True) < 1e3
        opt.step()
    model = Free(w=torch.zeros(3, dtype=torch.float64))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
    (model.w * 1e300).sum().backward()
    _refused(lambda: opt.clip_grad_norm_(1.0, error_if_nonfinite=True), "every gradient is finite")


def test_norms_that_are_not_finite_raise_on_request() -> None:
    run(at_each_stage, 2, _infinity, _error_if_nonfinite)


def _norms_of_groups(rank: int, world: int, stage: int) -> None:
    model, plain = mlp(), mlp()
    if stage == 3:
        opt = zero.ZeroOptimizer(model, "sgd", stage=3, lr=0.1, min_unit_numel=0)
        counts = [[0, 1, 2, 3, 4, 5]]
    else:
        layers = [model[0], model[2], model[3]]
        groups = [{"params": list(layer.parameters())} for layer in layers]
        opt = zero.ZeroOptimizer(groups, "sgd", stage=stage, lr=0.1)
        counts = [[0, 1], [2, 3], [4, 5]]
    mlp_loss(model, rank).backward()
    (sum(mlp_loss(plain, r) for r in range(world)) / world).backward()
    gradients = [p.grad for p in plain.parameters()]
    for kind in (1.0, 2.0, 3.0, INF):
        got = opt.grad_norm(kind, per_group=True)
        want = [nn.utils.get_total_norm([gradients[i] for i in group], kind) for group in counts]
        assert len(got) == len(want)
        for ours, theirs in zip(got, want, strict=True):
            assert ours.shape == () and ours.dtype == torch.float32
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)
        if len(got) == 1:
            assert torch.equal(got[0], opt.grad_norm(kind))


def _clip_value(rank: int, world: int, stage: int) -> None:
    for by_torch in (False, True, None):
        model, plain = mlp(), mlp()
        opt = shard(model, stage)
        mlp_loss(model, rank).backward()
        (sum(mlp_loss(plain, r) for r in range(world)) / world).backward()
        if by_torch is None:
            nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=False)
        elif by_torch:
            nn.utils.clip_grad_value_(model.parameters(), 0.01)
        else:
            opt.clip_grad_value_(0.01)
        nn.utils.clip_grad_value_(plain.parameters(), 0.01)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            got = zero.full_grad(p)
            torch.testing.assert_close(got, q.grad, rtol=1e-5, atol=1e-8, msg=name)
            assert got.abs().max() <= 0.01
        opt.step()
    with pytest.raises(ValueError, match="clip_value >= 0, got -1"):
        opt.clip_grad_value_(-1.0)


@pytest.mark.parametrize("world", [2, 3])
def test_norms_of_groups_and_clipping_by_value(world: int) -> None:
    run(at_each_stage, world, _norms_of_groups, _clip_value)


def test_the_norms_are_the_same_at_every_world_size() -> None:
    got = {tuple(norms) for world in (1, 2, 3) for norms in run(_same_norms, world)}
    assert len(got) == 1


def _same_norms(rank: int, world: int) -> list[float]:
    norms = []
    for stage in range(4):
        model = mlp()
        opt = shard(model, stage)
        mlp_loss(model, rank=0).backward()  # the same data everywhere
        got = [float(opt.grad_norm(kind)) for kind in (1.0, 2.0, 3.0, INF)]
        assert not norms or norms == got
        norms = got
    return norms
