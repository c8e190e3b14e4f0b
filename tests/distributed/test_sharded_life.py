"""What becomes of a sharded module: inference, new optimizers, a plain module again, nothing."""

from __future__ import annotations

import copy
import gc
import os
import statistics
import weakref

import pytest
import torch
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from sharded_models import WHOLE, square_layers
from torch import nn

import zero_torch as zero


def _gathers(wrapped: object) -> int:
    return zero.report(wrapped).as_dict()["traffic"]["all_gather"]


def _plain_again(rank: int, world: int) -> None:
    hooks = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_state_dict_hooks",
        "_forward_hooks_with_kwargs",
    )
    more = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    tables = (*hooks, *more, "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

    def counts(model: nn.Module) -> dict[str, int]:
        return {
            f"{name}.{table}": len(getattr(part, table))
            for name, part in model.named_modules()
            for table in tables
        }

    for how in ("unwrap", "unwrap the wrapper", "release"):
        model = make_gpt()
        before = counts(model)
        if how == "release":
            opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)
            called = model
        else:
            called = zero.ZeroModule(model, stage=3, **WHOLE)
            opt = zero.ZeroOptimizer(called, lr=1e-2)
        for step in range(2):
            loss_of(called, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
        want = weights(model)
        assert counts(model) != before
        if how == "release":
            opt.release()
        else:
            assert zero.unwrap(called if how == "unwrap the wrapper" else model) is model
        assert counts(model) == before
        with torch.no_grad():
            assert_equal({n: p.clone() for n, p in model.state_dict().items()}, want)
            model.head.weight.mul_(1.0)
        twin = copy.deepcopy(model)
        sgd, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        for m, o in ((model, sgd), (twin, other)):
            for _ in range(2):
                loss_of(m, batch(7, rank)).backward()
                o.step()
                o.zero_grad()
        assert_equal(weights(model), weights(twin))
        again = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)  # and sharded anew
        loss_of(model, batch(0, rank)).backward()
        again.step()
        again.release()


def _inference(rank: int, world: int) -> None:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = make_gpt()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.gpt(tokens)

        @torch.no_grad()
        def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
            for _ in range(count):
                tokens = torch.cat([tokens, self.gpt(tokens)[:, -1:].argmax(-1)], 1)
            return tokens

        @torch.no_grad()
        def norm(self) -> float:
            return float(self.gpt.head.weight.norm())  # no forward at all

    plain = Generator()
    wrapped = zero.ZeroModule(Generator(), stage=3, **WHOLE)
    tokens = batch(0, 0)[:, :3]
    assert torch.equal(wrapped.generate(tokens, 4), plain.generate(tokens, 4))
    assert wrapped.norm() == plain.norm()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(wrapped(tokens), plain(tokens))
    assert _gathers(wrapped) > 0
    wrapped.unshard()
    before = _gathers(wrapped)
    for _ in range(2):
        wrapped.generate(tokens, 4)
        wrapped(tokens).sum().backward()
    with torch.no_grad():
        assert torch.equal(wrapped.module.gpt.head.weight.sum(), plain.gpt.head.weight.sum())
    assert _gathers(wrapped) == before
    wrapped.unshard()
    wrapped.reshard()
    with torch.no_grad(), pytest.raises(RuntimeError, match="is sharded"):
        wrapped.module.gpt.head.weight.sum()
    wrapped(tokens)
    assert _gathers(wrapped) > before
    wrapped.reshard()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lifetime(rank: int, world: int) -> None:
    sizes = []
    for round_ in range(12):
        model = square_layers(8, 256)
        wrapped = zero.ZeroModule(model, stage=3)
        opt = zero.ZeroOptimizer(wrapped, lr=1e-3)
        for _ in range(2):
            wrapped(torch.ones(2, 256)).sum().backward()
            opt.step()
        if round_ % 2 == 0:
            opt.zero_grad()
        watch = [weakref.ref(o) for o in (model, wrapped, opt, *model.parameters())]
        del model, wrapped, opt
        gc.collect()
        assert all(ref() is None for ref in watch), round_
        sizes.append(_resident())
    # Less than one model in six rounds; single values wander.
    grown = statistics.median(sizes[6:]) - statistics.median(sizes[:6])
    assert grown < 8 * 256 * 256 * 4, [size >> 10 for size in sizes]


def _optimizers_come_and_go(rank: int, world: int) -> None:
    model = make_gpt()
    wrapped = zero.ZeroModule(model, stage=3, **WHOLE)
    plain = make_gpt()
    for round_ in range(3):
        opt = zero.ZeroOptimizer(wrapped, "sgd", lr=0.1)
        other = zero.ZeroOptimizer(plain, "sgd", stage=0, lr=0.1)
        for m, o in ((wrapped, opt), (plain, other)):
            loss_of(m, batch(round_, rank)).backward()
            o.step()
            o.zero_grad()
        with pytest.raises(ValueError, match="has an optimizer already"):
            zero.ZeroOptimizer(wrapped, "sgd", lr=0.1)
        del opt, o, other
        gc.collect()
        assert_equal(weights(model), weights(plain))
        with torch.no_grad():  # sharded still, and working
            assert torch.equal(wrapped(batch(9, 0)[:, :8]), plain(batch(9, 0)[:, :8]))
            with pytest.raises(RuntimeError, match="is sharded"):
                model.head.weight.sum()
    # Without a ZeroModule the model's hooks own the engine.
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)
    del opt
    gc.collect()
    assert_equal(weights(model), weights(make_gpt()))
    assert loss_of(model, batch(0, rank)).item() == loss_of(make_gpt(), batch(0, rank)).item()


def _lives(rank: int, world: int) -> None:
    for check in (_plain_again, _inference, _optimizers_come_and_go, _lifetime):
        check(rank, world)


def test_the_life_of_a_sharded_module() -> None:
    run(_lives, 2, fresh=True)
