"""Models built without storage, and training under autocast, at stage 3."""

from __future__ import annotations

import gc
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from safetensors.torch import save_file
from sharded_models import WHOLE, units_of_gpt
from torch import nn

import zero_torch as zero


def _deferred(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    with zero.deferred_init():
        model = make()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(seed)  # as it was before a plain constructor
    return model


def _train(model: nn.Module, opt: zero.ZeroOptimizer, rank: int) -> dict[str, torch.Tensor]:
    for step in range(4):
        loss_of(model, batch(step, rank)).backward()
        opt.clip_grad_norm_(0.5)
        opt.step()
        opt.zero_grad()
    return weights(model)


def _same_as_built(rank: int, world: int) -> None:
    plain = make_gpt()
    want = weights(plain)
    trained = _train(plain, zero.ZeroOptimizer(plain, stage=0, lr=1e-2), rank)
    for stage in (0, 2, 3):
        model = _deferred(make_gpt, seed=0 if rank == 0 else 7)  # rank 0's values must win
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **WHOLE)
        assert_equal(weights(model), want)
        assert model.head.weight is model.tokens.weight
        assert [id(p) for p in opt.param_groups[0]["params"]] == [id(p) for p in model.parameters()]
        assert_equal(_train(model, opt, rank), trained)
        model = _deferred(make_gpt)
        wrapped = zero.ZeroModule(model, stage=stage, **WHOLE)
        opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
        assert_equal(_train(wrapped, opt, rank), trained)
        assert_equal(weights(zero.unwrap(wrapped)), trained)


def _set(module: nn.Module) -> None:
    for name, p in module.named_parameters(recurse=False):
        nn.init.constant_(p, 0.5 if name == "bias" else 0.25)


def _other_sources(rank: int, world: int) -> None:
    want = weights(make_gpt(seed=4))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "weights.safetensors"
        save_file({n: v for n, v in want.items() if n != "head.weight"}, file)
        for stage in (2, 3):
            for source in (file, str(file), folder, [file], want):
                model = _deferred(make_gpt)
                wrapped = zero.ZeroModule(model, stage=stage, init_from=source, **WHOLE)
                assert_equal(weights(model), want)
                loss_of(wrapped, batch(0, rank)).backward()
            model = _deferred(make_gpt)
            opt = zero.ZeroOptimizer(model, stage=stage, init_fn=_set, **WHOLE)
            assert zero.full_param(model.blocks[1].up.weight).eq(0.25).all()
            assert zero.full_param(model.blocks[1].up.bias).eq(0.5).all()
            loss_of(model, batch(0, rank)).backward()
            opt.step()
        torch.save(want, Path(folder) / "weights.pt")
        short = {n: v for n, v in want.items() if n != "norm.bias"}
        bad = {**want, "norm.bias": torch.ones(3)}
        for source, error in ((short, r"norm\.bias"), (bad, r"norm\.bias.*shape")):
            with pytest.raises(ValueError, match=error):
                zero.ZeroModule(_deferred(make_gpt), stage=3, init_from=source, **WHOLE)
        with pytest.raises(FileNotFoundError):
            zero.ZeroModule(_deferred(make_gpt), stage=3, init_from=f"{folder}/none", **WHOLE)
    with pytest.raises(ValueError, match="this one has values"):
        zero.ZeroModule(make_gpt(), stage=3, init_fn=_set)
    with pytest.raises(TypeError, match="need a module"):
        zero.ZeroOptimizer([nn.Parameter(torch.ones(2))], stage=2, init_fn=_set)


class Lazy(nn.Module):
    """No reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def _errors(rank: int, world: int) -> None:
    """Found by all ranks before they communicate, and by a rank that fails alone in time."""
    make = lambda: nn.Sequential(nn.Linear(4, 4), Lazy())  # noqa: E731
    with pytest.raises(ValueError, match=r"'1' \(Lazy\) has no reset_parameters\(\)"):
        zero.ZeroModule(_deferred(make), stage=3)
    with pytest.raises(ValueError, match=r"expected init_fn to fill.*'scale' untouched"):
        zero.ZeroModule(_deferred(make), stage=3, init_fn=lambda module: None)
    wrapped = zero.ZeroModule(_deferred(make), stage=3, init_fn=_set)
    wrapped(torch.ones(2, 4)).sum().backward()
    assert zero.full_param(wrapped.module[1].scale).eq(0.25).all()
    # Plain meta tensors, without deferred_init().
    with torch.device("meta"):
        model = make_gpt()
    torch.manual_seed(0)
    assert_equal(weights(zero.ZeroModule(model, stage=3, **WHOLE)), weights(make_gpt()))


def _high_water() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _big(count: int = 24, width: int = 1024) -> nn.Module:
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


def _construction_peak(rank: int, world: int) -> None:
    layer, count = 1024 * 1024 * 4, 24
    zero.ZeroModule(_deferred(lambda: _big(2)), stage=3)  # what the first use costs
    gc.collect()
    before = _high_water()
    wrapped = zero.ZeroModule(_deferred(_big), stage=3)
    grown = _high_water() - before
    total = count * layer
    peak = zero.report(wrapped).as_dict()["peak"]
    assert peak["parameters"] + peak["buffers"] <= total // world + 2 * layer
    assert grown < total // world + 6 * layer, grown / layer
    model = _deferred(make_gpt)
    sizes = [sum(p.numel() for p in unit) * 4 for unit in units_of_gpt(model)]
    peak = zero.report(zero.ZeroModule(model, stage=3, **WHOLE)).as_dict()["peak"]
    padding = 64 * world * 30
    bound = sum(sizes) // world + sizes[0] + max(sizes) + padding
    assert peak["parameters"] + peak["buffers"] <= bound


def _built_without_storage(rank: int, world: int) -> None:
    for check in (_construction_peak, _same_as_built, _other_sources, _errors):
        check(rank, world)


@pytest.mark.parametrize("world", [1, 2])
def test_models_built_without_storage(world: int) -> None:
    run(_built_without_storage, world)


class Once(nn.Module):
    """Each weight is used once in a forward."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.enter = nn.Embedding(31, width)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.LayerNorm(width),
                    nn.Linear(width, 2 * width),
                    nn.GELU(),
                    nn.Linear(2 * width, width),
                )
                for _ in range(3)
            ]
        )
        self.leave = nn.Linear(width, 31)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return self.leave(x)


def _autocast(rank: int, world: int) -> None:
    results = []
    for stage, settings in (
        (0, {}),
        (3, {}),
        (3, {"prefetch": 0}),
        (3, {"reshard_after_forward": False}),
        (3, {"units": [nn.Linear]}),
    ):
        torch.manual_seed(1)
        model = Once()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **{**WHOLE, **settings})
        losses, norms = [], []
        for step in range(8):
            tokens = batch(step, rank) % 31
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
            loss.backward()
            losses.append(loss.item())
            norms.append(float(opt.clip_grad_norm_(0.5)))
            opt.step()
            opt.zero_grad()
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                losses.append(float(model(tokens).float().sum()))
        results.append((weights(model), losses, norms))
    for got, losses, norms in results[1:]:
        assert losses == results[0][1]
        assert norms == results[0][2]
        assert_equal(got, results[0][0])


def _live_bfloat16() -> int:
    gc.collect()
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for tensor in gc.get_objects()
        if type(tensor) is torch.Tensor and tensor.dtype is torch.bfloat16
    }
    return sum(storages.values())


def _resident() -> int:
    text = Path("/proc/self/statm").read_text()
    return int(text.split()[1]) * resource.getpagesize()


def _no_casts_are_kept(rank: int, world: int) -> None:
    width, count = 512, 20
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])
    opt = zero.ZeroOptimizer(model, stage=3, lr=1e-3)
    casts = 2 * width * width * count
    grown = []
    for _ in range(4):
        before = _resident()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(torch.ones(1, width)).sum()
        grown.append(_resident() - before)
        assert _live_bfloat16() < casts / 10
        loss.backward()
        opt.step()
        opt.zero_grad()
    assert min(grown[1:]) < casts / 2, grown


def _under_autocast(rank: int, world: int) -> None:
    _no_casts_are_kept(rank, world)
    _autocast(rank, world)


def test_autocast_at_stage_3() -> None:
    run(_under_autocast, 2)
