"""Loss scaling and gradients that are not finite, at stages 0 to 3 (E11, E15, E16 and more)."""

from __future__ import annotations

import itertools

import pytest
import torch
from models import Free, assert_close, assert_equal, mlp, mlp_loss, poison, shard, weights
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

INF, NAN = float("inf"), float("nan")
STAGES = (0, 1, 2, 3)


def states(opt: zero.ZeroOptimizer) -> dict[str, torch.Tensor]:
    """Weights' companions, whole, by index and name."""
    return {
        f"{index} {name}": torch.as_tensor(value).clone()
        for index, state in opt.state_dict()["state"].items()
        for name, value in state.items()
    }


# E11


def _scale_that_grows(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.zeros(2))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    scaler.scale((model.w * torch.tensor([3.0, 4.0])).sum()).backward()
    scaler.unscale_(opt)
    assert float(opt.clip_grad_norm_(1.0)) == 5.0
    torch.testing.assert_close(zero.full_grad(model.w), torch.tensor([0.6, 0.8]))
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2048.0
    assert float(opt.grad_norm()) == pytest.approx(1.0)
    torch.testing.assert_close(zero.full_param(model.w), torch.tensor([-0.6, -0.8]))


def test_e11_the_norm_is_of_the_unscaled_gradient() -> None:
    run(at_each_stage, 2, _scale_that_grows)


# E15


def _one_shard_overflows(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.ones(64))
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    factor = torch.ones(64)
    factor[63] = INF  # in the last rank's part
    scaler.scale((model.w * factor).sum()).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert scaler.get_scale() == 512.0
    assert zero.full_param(model.w).tolist() == [1.0] * 64
    assert states(opt) == {}
    scaler.scale(model.w.sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 512.0
    assert (zero.full_param(model.w) < 0.91).all()


def _one_element(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.ones(1))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor, scale, weight in ((INF, 512.0, 1.0), (1.0, 512.0, 0.5), (NAN, 256.0, 0.5)):
        scaler.scale((model.w * factor).sum()).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        assert scaler.get_scale() == scale
        assert zero.full_param(model.w).item() == weight


@pytest.mark.parametrize("world", [2, 3])
def test_e15_all_ranks_skip_or_none(world: int) -> None:
    run(at_each_stage, world, _one_shard_overflows, _one_element)


def _like_a_single_process(rank: int, world: int, stage: int) -> None:
    """Six steps of a scaler, two of which overflow on one rank, against torch's own."""
    model, plain = mlp(), mlp()
    opt = shard(model, stage)
    other = torch.optim.SGD(plain.parameters(), lr=0.1)
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) for _ in range(2)]
    for step in range(6):
        bad = INF if step in (1, 4) else 0.0
        handle = poison(model[2].weight, 5, bad if rank == world - 1 else 0.0)
        scalers[0].scale(mlp_loss(model, rank, step)).backward()
        handle.remove()
        handle = poison(plain[2].weight, 5, bad)
        mean = sum(mlp_loss(plain, r, step) for r in range(world)) / world
        scalers[1].scale(mean).backward()
        handle.remove()
        for scaler, optimizer in zip(scalers, (opt, other), strict=True):
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale(), step
        assert scalers[0].state_dict() == scalers[1].state_dict()
    assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


def test_a_grad_scaler_does_what_it_does_with_one_process() -> None:
    run(at_each_stage, 2, _like_a_single_process)


# E16


def _bf16(rank: int, world: int) -> None:
    runs = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 9), nn.Linear(9, 2)).bfloat16()
        opt = shard(model, stage, lr=0.05)
        norms = []
        for step in range(5):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 6, generator=generator).bfloat16()
            model(x).float().square().mean().backward()
            norms.append(float(opt.clip_grad_norm_(1.0)))
            assert 0.01 < norms[-1] < 100.0
            opt.step()
            opt.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        runs.append((norms, weights(model)))
    for norms, values in runs[1:]:
        assert norms == runs[0][0]
        assert_equal(values, runs[0][1])


def test_e16_bf16_at_every_stage_is_not_scaled() -> None:
    run(_bf16, 2)


# on_nonfinite


def _policy(rank: int, world: int, stage: int) -> None:
    values = itertools.product(("ignore", "skip", "raise"), ("adamw", torch.optim.Adam), (INF, NAN))
    for policy, rule, bad in values:
        model = mlp()
        opt = zero.ZeroOptimizer(model, rule, stage=stage, lr=1e-2, on_nonfinite=policy)
        mlp_loss(model, rank).backward()
        opt.step()
        opt.zero_grad()
        before, state = weights(model), states(opt)
        # On one rank; in the model's order '0.bias' is the first of them.
        handles = [
            poison(p, 2, bad if rank == 1 else 0.0) for p in (model[3].weight, model[0].bias)
        ]
        mlp_loss(model, rank).backward()
        for handle in handles:
            handle.remove()
        if policy == "raise":
            with pytest.raises(RuntimeError, match=rf"parameter '0.bias' .*rank.* of {world}"):
                opt.step()
        else:
            opt.step()
        opt.zero_grad()
        taken = policy == "ignore"
        if taken:
            assert not torch.isfinite(weights(model)["0.bias"]).all()
        else:
            assert_equal(weights(model), before)
            assert_equal(states(opt), state)
            mlp_loss(model, rank).backward()
            opt.step()
            assert not torch.equal(weights(model)["0.bias"], before["0.bias"])
        report = zero.report(opt)
        assert report.steps == 2
        assert report.nonfinite_steps == (0 if taken else 1)
        assert report.nonfinite_parameter == (None if taken else "0.bias")
        assert ("non-finite" in str(report)) is not taken


@pytest.mark.parametrize("world", [2, 3])
def test_all_ranks_skip_raise_or_ignore(world: int) -> None:
    run(at_each_stage, world, _policy)


def _each_dtype(rank: int, world: int, stage: int) -> None:
    kinds = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
    for dtype, bad in itertools.product(kinds, (INF, -INF, NAN)):
        model = Free(
            **{f"p{i}": torch.ones(33, dtype=other) for i, other in enumerate(kinds)},
            last=torch.ones(70, dtype=dtype),
        )
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.5, on_nonfinite="skip")
        factor = torch.ones(70, dtype=dtype)
        if rank == 0:
            factor[69] = bad
        total = (model.last * factor).sum().double()
        for i in range(len(kinds)):
            total = total + getattr(model, f"p{i}").sum().double()
        total.backward()
        opt.step()
        assert zero.full_param(model.p0).tolist() == [1.0] * 33
        assert zero.report(opt).nonfinite_parameter == "last"


def test_every_dtype_is_checked() -> None:
    run(at_each_stage, 2, _each_dtype)


def _with_a_scaler(rank: int, world: int, stage: int) -> None:
    """An overflow is the scaler's to handle; raising is for what it lets through."""
    model = mlp()
    opt = shard(model, stage, on_nonfinite="raise")
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    before = weights(model)
    handle = poison(model[0].weight, 1, INF if rank == 1 else 0.0)
    scaler.scale(mlp_loss(model, rank)).backward()
    handle.remove()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 32.0
    assert_equal(weights(model), before)
    opt.zero_grad()
    scaler.scale(mlp_loss(model, rank)).backward()
    scaler.step(opt)
    assert zero.report(opt).steps == 1


def _traffic(rank: int, world: int, stage: int) -> None:
    """The check is no training traffic, and an ordinary run has the bits of "ignore"."""
    runs = []
    for policy in ("ignore", "skip", "raise"):
        model = mlp()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, on_nonfinite=policy)
        for step in range(3):
            mlp_loss(model, rank, step).backward()
            opt.step()
            opt.zero_grad()
        runs.append((weights(model), zero.report(opt).as_dict()["traffic"]))
    for values, traffic in runs[1:]:
        assert_equal(values, runs[0][0])
        assert traffic == runs[0][1]


def test_the_policy_beside_a_scaler_and_without_need() -> None:
    run(at_each_stage, 2, _with_a_scaler, _traffic)


def _other_policies(rank: int, world: int) -> None:
    with pytest.raises(ValueError, match="on_nonfinite skip"):
        zero.ZeroOptimizer(mlp(), stage=1, on_nonfinite="raise" if rank else "skip")


def test_ranks_must_have_one_policy() -> None:
    run(_other_policies, 2)
