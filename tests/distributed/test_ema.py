"""Sharded averages of weights: against torch's AveragedModel, and their own rule."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import assert_close, assert_equal, mlp, mlp_loss, shard, step_both, weights
from ranks import at_each_stage, run
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zero_torch as zero

DECAY = 0.75


def _averages(ema: zero.EMA, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: ema.average(p) for name, p in model.named_parameters()}


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: zero.full_param(p) for name, p in model.named_parameters()}


def _follows_torch(rank: int, world: int, stage: int) -> None:
    model, plain = mlp(), mlp()
    opt, other = shard(model, stage), torch.optim.SGD(plain.parameters(), lr=0.1)
    ema = zero.EMA(opt, DECAY)
    torch_ema = AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    torch_ema.update_parameters(plain)  # its first update copies
    for step in range(4):
        step_both(
            model, opt, lambda net, r, step=step: mlp_loss(net, r, step), plain, other, rank, world
        )
        ema.update()
        torch_ema.update_parameters(plain)
    assert ema.updates == 4
    assert_close(_averages(ema, model), weights(torch_ema.module))
    before = _full(model)
    x = torch.linspace(-1, 1, 5)
    with ema.swapped():
        torch.testing.assert_close(model(x), torch_ema.module(x))
        assert_close(zero.state_dict(model, rank0_only=False), weights(torch_ema.module))
        with pytest.raises(RuntimeError, match="averages"):
            opt.step()
        with pytest.raises(RuntimeError, match="averages"):
            ema.update()
        with pytest.raises(RuntimeError, match="nested"), ema.swapped():
            pass
    assert_equal(_full(model), before)
    with pytest.raises(ZeroDivisionError), ema.swapped():
        raise ZeroDivisionError
    assert_equal(_full(model), before)


def _keeps_the_rule_bit_for_bit(rank: int, world: int, stage: int) -> None:
    """Also of masters, and a run that evaluated with averages goes on like one that did not."""
    for dtype, settings in (
        (torch.float32, {}),
        (torch.float32, {"param_dtype": torch.bfloat16}),
        (torch.bfloat16, {}),
    ):
        runs: list[tuple[nn.Module, zero.ZeroOptimizer]] = []
        for _ in range(2):
            model = mlp().to(dtype)
            runs.append((model, shard(model, stage, **settings)))
        (model, opt), (alone, _) = runs
        ema = zero.EMA(opt, DECAY)
        want = {name: value.float() for name, value in _full(model).items()}
        for step in range(3):
            for net, optimizer in runs:
                kind = next(net.parameters()).dtype
                generator = torch.Generator().manual_seed(10 * step + rank)
                x = torch.randn(4, 5, generator=generator).to(kind)
                net(x).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            ema.update()
            for name, value in _full(model).items():
                want[name].lerp_(value.float(), 1 - DECAY)
            assert_equal(_averages(ema, model), want)
            with ema.swapped():
                for name, p in model.named_parameters():
                    with zero.gathered(p):
                        assert torch.equal(p, want[name].to(p.dtype)), name
        assert_equal(_full(model), _full(alone))
        assert_equal(zero.state_dict(model, rank0_only=False), zero.state_dict(alone, True, False))


def _freezing(rank: int, world: int, stage: int) -> None:
    model = mlp()
    model[3].requires_grad_(False)
    opt = shard(model, stage)
    ema = zero.EMA(opt, DECAY)
    frozen = zero.full_param(model[3].weight)
    for step in range(2):
        if step == 1:
            model[3].requires_grad_(True)
        mlp_loss(model, rank, step).backward()
        opt.step()
        opt.zero_grad()
        if step == 0:
            assert torch.equal(ema.average(model[3].weight), frozen)
            ema.update()
    ema.update()  # what was unfrozen starts at the values that it has by then
    assert torch.equal(ema.average(model[3].weight), zero.full_param(model[3].weight))
    with ema.swapped():
        pass


def _state(rank: int, world: int, stage: int) -> None:
    models = [mlp(), mlp(1)]
    opts = [shard(models[0], stage), shard(models[1], (stage + 1) % 4)]
    emas = [zero.EMA(opts[0], DECAY), zero.EMA(models[1], 0.5)]
    mlp_loss(models[0], rank).backward()
    opts[0].step()
    emas[0].update()
    state = emas[0].state_dict()
    assert bool(state) == (rank == 0)
    emas[1].load_state_dict(state if rank == 0 else None)
    assert (emas[1].decay, emas[1].updates) == (DECAY, 1)
    want = _averages(emas[0], models[0])
    assert_equal(_averages(emas[1], models[1]), want)
    everywhere = emas[1].state_dict(rank0_only=False)
    assert_equal(everywhere["averages"], want)
    again = zero.EMA(opts[1])
    again.load_state_dict(everywhere, rank0_only=False)
    assert_equal(_averages(again, models[1]), want)
    wrong: dict[str, Any] = copy.copy(everywhere)
    wrong["averages"] = {"0.weight": torch.zeros(3), "other": torch.zeros(1)}
    with pytest.raises((ValueError, RuntimeError), match=r"missing.*0.bias.*other.*0.weight"):
        again.load_state_dict(wrong if rank == 0 else None)
    assert_equal(_averages(again, models[1]), want)


def _memory(rank: int, world: int, stage: int) -> int:
    model = mlp()
    return zero.EMA(shard(model, stage))._core.bytes()


@pytest.mark.parametrize("world", [1, 2, 3])
def test_averages_follow_torch_and_weights_come_back(world: int) -> None:
    run(at_each_stage, world, _follows_torch, _freezing)


@pytest.mark.parametrize("world", [1, 3])
def test_averages_keep_their_rule_bit_for_bit(world: int) -> None:
    run(at_each_stage, world, _keeps_the_rule_bit_for_bit)


def test_state_moves_between_stages() -> None:
    run(at_each_stage, 2, _state)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_ranks_share_the_averages(stage: int) -> None:
    numel = sum(p.numel() for p in mlp().parameters())
    shares = run(_memory, 3, stage)
    assert sum(shares) == 4 * numel
    assert max(shares) < 0.6 * 4 * numel


def test_bad_arguments_are_refused() -> None:
    model = mlp()
    opt = shard(model, 1)
    for decay in (1.0, -0.1, float("nan")):
        with pytest.raises(ValueError, match="decay"):
            zero.EMA(opt, decay)
    with pytest.raises(TypeError, match="ZeroOptimizer"):
        zero.EMA(3)
    with pytest.raises(ValueError, match="0 of them"):
        zero.EMA(mlp())
    ema = zero.EMA(opt)
    with pytest.raises(ValueError, match="decay"):
        ema.decay = 1.5
    with pytest.raises(ValueError, match="manages"):
        ema.average(torch.zeros(2))
