"""Awkward parameters and ways to build a model: reports by users of other systems (E59-E73)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import Free, assert_close, assert_gradients, mean_of_ranks, step_both, weights
from ranks import at_each_stage, run
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import zero_torch as zero

Loss = Callable[[nn.Module, int], torch.Tensor]
RULES = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adamw": (torch.optim.AdamW, {"lr": 0.1}),
}


def _states(opt: torch.optim.Optimizer) -> dict[int, dict[str, torch.Tensor]]:
    return opt.state_dict()["state"]


def _train_alike(
    model: nn.Module,
    opt: zero.ZeroOptimizer,
    plain: nn.Module,
    other: torch.optim.Optimizer,
    loss: Loss,
) -> None:
    """Three steps of both; then state dicts fit the plain model and its optimizer."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for _ in range(3):
        step_both(model, opt, loss, plain, other, rank, world)
    assert_close(weights(model), weights(plain), rtol=1e-5)
    restored = copy.deepcopy(plain)
    restored.load_state_dict(model.state_dict())
    for (name, p), value in zip(plain.named_parameters(), restored.parameters(), strict=True):
        assert value.shape == p.shape and value.dtype == p.dtype, name
    ours, theirs = _states(opt), _states(other)
    assert ours.keys() == theirs.keys()
    for index, state in theirs.items():
        for name, value in state.items():
            torch.testing.assert_close(ours[index][name], value, rtol=1e-5, atol=1e-6)
    other.load_state_dict(opt.state_dict())
    saved = zero.state_dict(model), zero.optimizer_state_dict(opt)
    assert list(saved[0]) == (list(plain.state_dict()) if rank == 0 else [])
    assert bool(saved[1]) == (rank == 0)
    zero.load_state_dict(model, saved[0])
    zero.load_state_dict(opt, saved[1])
    assert_close(weights(model), weights(plain), rtol=1e-5)


# E59


class Heads(nn.Module):
    """An empty layer among others, which are plain parameters of 8 and 24 elements."""

    def __init__(self, order: str) -> None:
        super().__init__()
        for key in order:
            if key == "e":
                self.e = nn.Linear(4, 0, bias=False)
            else:
                count = {"a": 8, "b": 24}[key]
                setattr(self, key, nn.Parameter(torch.linspace(-1, 1, count)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        total = (self.a * x).sin().sum() + self.b.sin().sum() * x
        if hasattr(self, "e"):
            assert self.e.weight.shape == (0, 4)
            total = total + self.e(torch.ones(3, 4)).sum()
        return total


def _no_elements(rank: int, world: int, stage: int) -> None:
    def loss(net: nn.Module, rank: int) -> torch.Tensor:
        return net(torch.tensor(1.0 + rank))

    for order in ("eab", "abe", "aeb"):
        model = Heads(order)
        plain = copy.deepcopy(model)
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, min_unit_numel=0)
        other = torch.optim.AdamW(plain.parameters(), lr=0.1)
        _train_alike(model, opt, plain, other, loss)
    model, plain = Heads("ab"), Heads("ab")
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    other = torch.optim.AdamW(plain.parameters(), lr=0.1)
    for net, o in ((model, opt), (plain, other)):
        net.e = nn.Linear(4, 0, bias=False)
        o.add_param_group({"params": [net.e.weight]})  # alone in its group
    _train_alike(model, opt, plain, other, loss)


# E60, E62


def _scalars(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.tensor(2.0))
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    (model.w * (1.0 + rank)).backward()
    gradient = zero.full_grad(model.w)
    assert gradient.item() == 1.5 and gradient.shape == model.w.shape == ()
    opt.step()
    state = model.state_dict()
    assert state["w"].shape == ()
    plain = Free(w=torch.tensor(0.0))
    plain.load_state_dict(state)
    assert abs(plain.w.item() - (2.0 * (1 - 0.1 * 0.01) - 0.1)) < 1e-6
    assert zero.full_state(model.w)["exp_avg"].shape == ()


def _complex(rank: int, world: int, stage: int) -> None:
    model = Free(real=torch.ones(2), w=torch.tensor(1 + 1j))
    with pytest.raises(TypeError, match=r"parameter 'w' is torch\.complex64.*view_as_real"):
        zero.ZeroOptimizer(model, stage=stage, lr=0.1)


# E63


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Parameter(torch.linspace(-1, 1, 6).bfloat16())
        self.norm = nn.Parameter(torch.linspace(0.5, 1.5, 5))
        self.table = nn.Parameter(torch.arange(-3, 4, dtype=torch.int8), requires_grad=False)
        self.old = nn.Parameter(torch.linspace(0, 1, 3).half(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        fixed = self.table.float().square().sum() * self.old.float().sum()
        return (self.short * x).float().square().sum() + (self.norm * x).sum() * fixed


def _several_dtypes(rank: int, world: int, stage: int) -> None:
    model = Mixed()
    plain, start = copy.deepcopy(model), weights(model)
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    other = torch.optim.AdamW([plain.short, plain.norm], lr=0.1)
    for _ in range(2):
        model(torch.tensor(1.0 + rank)).backward()
        assert model.table.grad is None and model.old.grad is None
        opt.step()
        opt.zero_grad()
        (sum(plain(torch.tensor(1.0 + r)) for r in range(world)) / world).backward()
        other.step()
        other.zero_grad()
    ours = weights(model)
    assert [v.dtype for v in ours.values()] == [v.dtype for v in start.values()]
    assert [p.dtype for p in model.parameters()] == [v.dtype for v in start.values()]
    torch.testing.assert_close(ours["norm"], plain.norm.detach(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["short"], plain.short.detach(), rtol=1e-2, atol=1e-2)
    assert torch.equal(ours["table"], start["table"]) and torch.equal(ours["old"], start["old"])
    assert set(_states(opt)) == {0, 1} and zero.full_state(model.table) == {}
    fresh = Mixed()
    fresh.load_state_dict(model.state_dict())
    assert all(torch.equal(value, ours[name]) for name, value in weights(fresh).items())


def test_e59_e60_e62_e63_awkward_parameters() -> None:
    run(at_each_stage, 2, _no_elements, _scalars, _complex, _several_dtypes)


# E65, E66


class Gain(nn.Module):
    """Somebody's own module, with buffers of several kinds that no constructor argument gives."""

    calls = 0

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(width))
        self.register_buffer("frequencies", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        Gain.calls += 1
        nn.init.uniform_(self.gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.gain * self.frequencies.sum() + self.count.sum() * self.mask[0]


class NoReset(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.bias


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Sequential(Gain(5), nn.LayerNorm(5)), nn.Linear(5, 2))


def _assert_same(ours: nn.Module, theirs: nn.Module) -> None:
    assert_close(weights(ours), weights(theirs), rtol=0, atol=0)
    for (name, a), b in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(a, b) and a.dtype == b.dtype, name
    assert not any(p.is_meta for p in itertools.chain(ours.parameters(), ours.buffers()))


def _without_storage(rank: int, world: int, stage: int) -> None:
    settings: dict[str, Any] = {"lr": 0.1, "stage": stage, "min_unit_numel": 0}
    torch.manual_seed(3)
    built = _net()
    with zero.deferred_init():
        model = _net()
    torch.manual_seed(3 + rank)  # rank 0's values must win
    Gain.calls = 0
    opt = zero.ZeroOptimizer(model, **settings)
    assert Gain.calls == 1
    _assert_same(model, built)
    want = mean_of_ranks(built, lambda net, r: net(torch.full((2, 3), 1.0 + r)).sum(), world)
    model(torch.full((2, 3), 1.0 + rank)).sum().backward()
    assert_gradients(model, want)
    opt.step()

    with zero.deferred_init():
        other = nn.Sequential(_net(), NoReset())
    for build in (zero.ZeroOptimizer, zero.ZeroModule):
        given = settings if build is zero.ZeroOptimizer else {"stage": stage}
        with pytest.raises(ValueError, match=r"'1' \(NoReset\) has no reset_parameters.*'bias'"):
            build(other, **given)

    state = {**nn.Sequential(_net(), NoReset()).state_dict(), "1.bias": torch.tensor([5.0, 6.0])}
    state = {name: value + rank for name, value in state.items()}
    opt = zero.ZeroOptimizer(other, init_from=state, **settings)  # each rank has its own
    plain = nn.Sequential(_net(), NoReset())
    torch.manual_seed(0)
    from_rank_0 = zero.state_dict(other, rank0_only=False)
    assert from_rank_0["1.bias"].tolist() == [5.0, 6.0]
    plain.load_state_dict(from_rank_0)
    _assert_same(other, plain)
    x = torch.ones(2, 3)
    torch.testing.assert_close(other(x), plain(x))
    with torch.device("meta"):
        lost = _net()
    with pytest.raises(ValueError, match=r"'frequencies', 'mask'.*(deferred_init|persistent)"):
        zero.ZeroOptimizer(lost, **settings)
    assert dict(other.named_buffers())["0.1.0.frequencies"].tolist() == [0, 1, 2, 3]


# E71


def _normed(kind: str) -> nn.Module:
    layer = nn.Linear(2, 2, bias=False)
    nn.init.ones_(layer.weight)
    torch.manual_seed(0)
    if kind == "old weight":
        return nn.Sequential(nn.utils.weight_norm(layer))
    if kind == "weight":
        return nn.Sequential(parametrizations.weight_norm(layer))
    if kind == "old spectral":
        return nn.Sequential(nn.utils.spectral_norm(layer))
    return nn.Sequential(parametrizations.spectral_norm(layer))


def _parametrized(rank: int, world: int, stage: int) -> None:
    x = torch.tensor([[1.0, 2.0]])
    kinds = ("old weight", "weight", "old spectral", "spectral")
    for kind, units in itertools.product(kinds, (None, [nn.Linear])):
        model, plain = _normed(kind), _normed(kind)
        keys = list(plain.state_dict())
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, units=units, min_unit_numel=0)
        other = torch.optim.SGD(plain.parameters(), lr=0.1)
        for step in range(2):
            model(x).sum().backward()
            plain(x).sum().backward()
            assert_gradients(model, {n: p.grad for n, p in plain.named_parameters()})
            if step == 0 and "weight" in kind:
                g, v = (zero.full_grad(p) for p in model.parameters())
                torch.testing.assert_close(g, torch.full((2, 1), 2.1213), rtol=1e-4, atol=0)
                torch.testing.assert_close(v, torch.tensor([[-0.5, 0.5]] * 2), rtol=1e-5, atol=1e-6)
            for o in (opt, other):
                o.step()
                o.zero_grad()
        assert list(model.state_dict()) == keys
        assert_close(weights(model), weights(plain))
        zero.unwrap(model)
        for net in (model, plain):
            if kind == "old weight":
                nn.utils.remove_weight_norm(net[0])
            elif kind == "old spectral":
                nn.utils.remove_spectral_norm(net[0])
            else:
                parametrize.remove_parametrizations(net[0], "weight")
        assert list(model.state_dict()) == ["0.weight"]
        assert_close(weights(model), weights(plain))


# E73


def _added_later(rank: int, world: int, stage: int) -> None:
    for registered in (False, True):
        model = Free(w=torch.ones(2))
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        model.n = nn.Parameter(torch.ones(2))
        if registered:
            opt.add_param_group({"params": [model.n]})
        (model.w.sum() + model.n.sum() * (1 + rank)).backward()
        if registered:
            assert zero.full_grad(model.n).tolist() == [1.5, 1.5]
            opt.step()
            assert model.state_dict()["n"].shape == (2,)
        else:
            with pytest.raises(RuntimeError, match="'n' was added after the model was sharded"):
                opt.step()
    lazy = nn.Sequential(nn.LazyLinear(2))
    with pytest.raises(ValueError, match=r"'0\.weight' is lazy"):
        zero.ZeroOptimizer(lazy, stage=stage, lr=0.1)


def test_e65_e66_e71_e73_ways_to_build_a_model() -> None:
    run(at_each_stage, 2, _without_storage, _parametrized, _added_later)


# E67


def _fewer_elements_than_ranks(rank: int, world: int, stage: int) -> None:
    for rule, sizes in (("sgd", (1,)), ("adamw", (1, 2))):
        kind, settings = RULES[rule]
        model = Free(**{f"p{size}": torch.ones(size) for size in sizes})
        plain = copy.deepcopy(model)
        opt = zero.ZeroOptimizer(model, rule, stage=stage, **settings)
        other = kind(plain.parameters(), **settings)
        for net, o in ((model, opt), (plain, other)):
            net.extra = nn.Parameter(torch.ones(1))
            o.add_param_group({"params": [net.extra]})  # alone in its group

        def loss(net: nn.Module, rank: int) -> torch.Tensor:
            return sum((p * (1.0 + rank)).square().sum() for p in net.parameters())

        _train_alike(model, opt, plain, other, loss)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_e67_fewer_elements_than_ranks(world: int) -> None:
    run(at_each_stage, world, _fewer_elements_than_ranks)
