"""Comm hooks from Python, against arithmetic on the gradients that one process computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Free, mlp, mlp_loss, shard
from ranks import at_each_stage, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_torch as zero

SMALL: dict[str, Any] = {"bucket_bytes": 256, "first_bucket_bytes": 128}


def _local(rank: int) -> dict[str, torch.Tensor]:
    plain = mlp()
    mlp_loss(plain, rank).backward()
    return {name: p.grad.clone() for name, p in plain.named_parameters()}


def _summed(world: int, sent: Callable[[torch.Tensor], torch.Tensor]) -> dict[str, torch.Tensor]:
    """What ranks send, in fp32 and in rank order."""
    total: dict[str, torch.Tensor] = {}
    for rank in range(world):
        for name, gradient in _local(rank).items():
            term = sent(gradient)
            total[name] = term if rank == 0 else total[name] + term
    return total


def _assert_gradients(model: nn.Module, want: dict[str, torch.Tensor]) -> None:
    for name, p in model.named_parameters():
        got = zero.full_grad(p)
        assert got is not None and torch.equal(got, want[name]), name


def _after_backward(rank: int, stage: int, hook: Any, **settings: Any) -> Any:
    model = mlp()
    opt = shard(model, stage, **SMALL, **settings)
    opt.register_comm_hook(hook)
    mlp_loss(model, rank).backward()
    return model, opt


def _compressed(rank: int, world: int, stage: int) -> None:
    bf16 = _summed(world, lambda g: g.bfloat16().float())
    model, _opt = _after_backward(rank, stage, "bf16")
    _assert_gradients(model, {name: total / world for name, total in bf16.items()})
    fp16 = _summed(world, lambda g: (g / world).half().float())
    model, _opt = _after_backward(rank, stage, "fp16")
    _assert_gradients(model, fp16)


def _half_of_the_traffic(rank: int, world: int, stage: int) -> None:
    def sent(hook: Any) -> dict[str, int]:
        _model, opt = _after_backward(rank, stage, hook)
        return zero.report(opt).as_dict()["traffic"]

    plain, compressed = sent(None), sent("bf16")
    if stage == 0:
        half = plain["all_reduce"] // 2
        assert compressed["reduce_scatter"] * 2 == half > 0
        assert compressed["all_gather"] == half
    else:
        assert compressed["reduce_scatter"] * 2 == plain["reduce_scatter"] > 0


def whole(bucket: zero.GradientBucket) -> torch.Tensor:
    dist.all_reduce(bucket.gradients)
    return bucket.gradients / bucket.world_size


def part(bucket: zero.GradientBucket) -> torch.Tensor:
    dist.all_reduce(bucket.gradients)
    return bucket.shard / bucket.world_size


def future(bucket: zero.GradientBucket) -> torch.futures.Future[torch.Tensor]:
    work = dist.all_reduce(bucket.gradients, async_op=True)
    return work.get_future().then(lambda done: done.value()[0] / bucket.world_size)


def _of_ones_own(rank: int, world: int, stage: int) -> None:
    want = {name: total / world for name, total in _summed(world, lambda g: g).items()}
    for hook in (whole, part, future):
        model, _opt = _after_backward(rank, stage, hook)
        for name, p in model.named_parameters():  # Gloo sums in its own order
            torch.testing.assert_close(zero.full_grad(p), want[name], rtol=1e-6, atol=1e-7)


def _what_it_sees(rank: int, world: int, stage: int) -> None:
    seen: list[tuple[int, list[str]]] = []
    local = _local(rank)

    def look(bucket: zero.GradientBucket) -> torch.Tensor:
        seen.append((bucket.index, bucket.names))
        assert (bucket.rank, bucket.world_size) == (rank, world)
        assert bucket.dtype == bucket.gradients.dtype == torch.float32
        assert bucket.gradients.dim() == 1 and bucket.gradients.is_contiguous()
        assert torch.equal(bucket.shard, bucket.gradients.chunk(world)[rank])
        rest = bucket.gradients.clone()
        for name in bucket.names:  # each at a multiple of 64 bytes
            numel = local[name].numel()
            assert torch.equal(rest[:numel], local[name].flatten()), name
            rest = rest[(numel + 15) // 16 * 16 :]
        assert not rest.any()
        return bucket.gradients

    _after_backward(rank, stage, look)
    assert len({index for index, _ in seen}) == len(seen) > 1
    assert sorted(name for _, names in seen for name in names) == sorted(local)


def _wrong_results(rank: int, world: int, stage: int) -> None:
    where = rf"bucket \d.*\(rank {rank} of {world}\)"
    cases = {
        r"shape \[\d+\].*got \[3\]": (lambda b: b.gradients[:3], ValueError),
        r"dtype Float.*got Double": (lambda b: b.gradients.double(), TypeError),
        r"a tensor.*got NoneType": (lambda b: None, TypeError),
        r"a tensor.*got int": (lambda b: 3, TypeError),
    }
    for words, (hook, error) in cases.items():
        with pytest.raises(error, match=words + ".*" + where):
            _after_backward(rank, stage, hook)


class MyError(Exception):
    pass


def _its_own_error(rank: int, world: int, stage: int) -> None:
    model = mlp()
    opt = shard(model, stage, transport="host", **SMALL)

    def fails(bucket: zero.GradientBucket) -> torch.Tensor:
        raise MyError("a bug")

    def passes(bucket: zero.GradientBucket) -> torch.Tensor:
        return bucket.gradients

    fails.__qualname__ = passes.__qualname__ = "hook"
    opt.register_comm_hook(fails if rank == 1 else passes)
    with pytest.raises(MyError if rank == 1 else RuntimeError, match=r"a bug|rank 1"):
        mlp_loss(model, rank).backward()
    opt.zero_grad()
    opt.register_comm_hook(None)
    mlp_loss(model, rank).backward()
    total = _summed(world, lambda g: g)
    _assert_gradients(model, {name: total[name] / world for name in total})


def _late_and_unfrozen(rank: int, world: int, stage: int) -> None:
    """What a layer gets from two reentrant checkpoints, and a layer that was frozen at wrap."""

    def run_(model: nn.Module, peer: int) -> torch.Tensor:
        x = torch.full((4, 5), float(peer + 1), requires_grad=True)
        return checkpoint(model, checkpoint(model, x, use_reentrant=True), use_reentrant=True).sum()

    def made() -> nn.Sequential:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5))
        return model.bfloat16().float()

    model, plain = made(), made()
    model[2].requires_grad_(False)
    opt = shard(model, stage, **SMALL)
    opt.register_comm_hook(_doubled_locally)
    model[2].requires_grad_(True)
    total: dict[str, torch.Tensor] = {}
    for peer in range(world):
        plain.zero_grad()
        run_(plain, peer).backward()
        for name, p in plain.named_parameters():
            total[name] = total.get(name, torch.zeros(())) + 2 * p.grad
    for _ in range(2):
        run_(model, rank).backward()
        for name, p in model.named_parameters():
            want = total[name] / world
            torch.testing.assert_close(zero.full_grad(p), want, rtol=1e-5, atol=1e-5, msg=name)
        opt.zero_grad()


def _doubled_locally(bucket: zero.GradientBucket) -> torch.Tensor:
    bucket.gradients.mul_(2)
    return part(bucket)


def _overflow(rank: int, world: int, stage: int) -> None:
    """A mean beyond the range of fp16 is inf on all ranks; one that fits is not."""
    for value, finite in ((65000.0 * world, True), (70000.0 * world, False)):
        model = Free(w=torch.ones(40))
        opt = shard(model, stage, units=None, on_nonfinite="skip")
        opt.register_comm_hook("fp16")
        (model.w.sum() * (value if rank == 0 else 0.0)).backward()
        opt.step()
        assert zero.report(opt).nonfinite_steps == (0 if finite else 1)
        moved = not torch.equal(zero.full_param(model.w), torch.ones(40))
        assert moved == finite


def _different_hooks(rank: int, world: int, stage: int) -> None:
    opt = shard(mlp(), stage)
    with pytest.raises(ValueError, match=r"'bf16' on rank 0 and 'test_comm_hooks.whole' on rank 1"):
        opt.register_comm_hook("bf16" if rank == 0 else whole)


def _of_a_module(rank: int, world: int, stage: int) -> None:
    model = zero.ZeroModule(mlp(), stage=stage, timeout=20.0, **SMALL)
    model.register_comm_hook("bf16")
    mlp_loss(model, rank).backward()
    total = _summed(world, lambda g: g.bfloat16().float())
    _assert_gradients(model.module, {name: total[name] / world for name in total})


def _accumulation(rank: int, world: int, stage: int) -> None:
    """Two backwards without traffic and one with it: the sum is rounded once."""
    model = mlp()
    opt = shard(model, stage, **SMALL)
    opt.register_comm_hook("bf16")
    with opt.no_sync():
        mlp_loss(model, rank).backward()
        mlp_loss(model, rank).backward()
    mlp_loss(model, rank).backward()
    total = _summed(world, lambda g: (g + g + g).bfloat16().float())
    _assert_gradients(model, {name: total[name] / world for name in total})
    mlp_loss(model, rank).backward()
    again = _summed(world, lambda g: g.bfloat16().float())
    _assert_gradients(model, {n: total[n] / world + again[n] / world for n in total})


def test_compression_sums_rounded_gradients_in_fp32() -> None:
    run(at_each_stage, 2, _compressed, _half_of_the_traffic, _accumulation, _of_a_module)


def test_compression_of_three_ranks() -> None:
    run(at_each_stage, 3, _compressed)


def test_fp16_overflows_to_inf() -> None:
    run(at_each_stage, 2, _overflow)


def test_hooks_of_ones_own() -> None:
    run(at_each_stage, 2, _of_ones_own, _what_it_sees, _late_and_unfrozen)


def test_wrong_hooks_are_told_so() -> None:
    run(at_each_stage, 2, _wrong_results, _its_own_error, _different_hooks)


@pytest.mark.parametrize(("hook", "error"), [("bf61", ValueError), (3, TypeError)])
def test_unknown_hooks_are_refused(hook: Any, error: type[Exception]) -> None:
    opt = shard(mlp(), 1)
    with pytest.raises(error, match='"bf16", "fp16", None or a callable'):
        opt.register_comm_hook(hook)


def test_no_hook_is_registered_inside_backward() -> None:
    model = mlp()
    opt = shard(model, 1)
    errors = []

    def register(gradient: torch.Tensor) -> None:
        with pytest.raises(RuntimeError, match="inside backward") as error:
            opt.register_comm_hook("bf16")
        errors.append(error)

    model[0].weight.register_hook(register)
    mlp_loss(model, 0).backward()
    assert errors
