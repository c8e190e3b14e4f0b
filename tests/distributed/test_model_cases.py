"""Several models, buffers, freezing, and ways around forward: reports by users (E84-E91)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from models import assert_close, assert_gradients, mean_of_ranks, ones, shard, weights
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

# E84


def _two_networks(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    nets = {
        name: nn.Sequential(nn.Linear(a, 4), nn.Tanh(), nn.Linear(4, b))
        for name, a, b in (("g", 2, 3), ("d", 3, 1))
    }
    plain = copy.deepcopy(nets)
    opts = {"g": shard(nets["g"], stage), "d": shard(nets["d"], (stage + 1) % 4)}
    other = {name: torch.optim.SGD(net.parameters(), lr=0.1) for name, net in plain.items()}

    def losses(net: dict[str, nn.Module], rank: int) -> dict[str, torch.Tensor]:
        z = torch.linspace(-1, 1 + rank, 6).view(3, 2)
        return {
            "d": net["d"](net["g"](z).detach()).square().sum(),
            "g": -net["d"](net["g"](z)).sum(),
        }

    for step in range(4):
        for turn in ("d", "g"):
            (sum(losses(plain, r)[turn] for r in range(world)) / world).backward()
            z = torch.linspace(-1, 1 + rank, 6).view(3, 2)
            if turn == "d":
                nets["d"](nets["g"](z).detach()).square().sum().backward()
                assert step % 2 or all(p.grad is None for p in nets["g"].parameters())
            else:
                (-nets["d"](nets["g"](z)).sum()).backward()
            for name in nets:
                assert_gradients(nets[name], {n: p.grad for n, p in plain[name].named_parameters()})
            opts[turn].step()
            other[turn].step()
            for name in nets:  # the one that took no step keeps its weights
                assert_close(weights(nets[name]), weights(plain[name]))
                if step % 2:  # else what the other turn left is added to
                    opts[name].zero_grad()
                    other[name].zero_grad()


# E85


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.register_buffer("scale", torch.tensor([2.0, 3.0]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x))) * self.scale


def _buffers(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Buffered()
    models = [copy.deepcopy(model) for _ in range(world)]
    opt = shard(model, stage)

    def loss(net: nn.Module, rank: int) -> torch.Tensor:
        data = torch.linspace(-1, 1 + rank, 24).view(2, 4, 3)
        return net(data[0]).square().sum() + net(data[1].sin()).square().sum()

    for _ in range(2):
        parts = [
            mean_of_ranks(models[r], lambda net, _, r=r: loss(net, r), 1) for r in range(world)
        ]
        loss(model, rank).backward()
        assert_gradients(model, {name: sum(p[name] for p in parts) / world for name in parts[0]})
        opt.zero_grad()
        for name, buffer in model.named_buffers():  # each rank's own statistics
            torch.testing.assert_close(buffer, dict(models[rank].named_buffers())[name])


# E86


class Term(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w * x


class Terms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = Term(), Term()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.a(x) + self.b(x)


def _frozen_for_a_while(rank: int, world: int, stage: int) -> None:
    x = torch.ones(())
    for units in (None, [Term]):
        model = Terms()
        opt = shard(model, stage, units=units, momentum=0.9)
        for step in range(4):
            model.b.w.requires_grad_(step != 1)
            model(x).backward()
            assert zero.full_grad(model.a.w).item() == 1.0
            assert (model.b.w.grad is None) == (step == 1)
            opt.step()
            opt.zero_grad()
            if step == 1:
                with torch.no_grad():
                    model(x)
        assert abs(zero.full_param(model.a.w).item() - 0.0951) < 1e-6
        assert abs(zero.full_param(model.b.w).item() - 0.439) < 1e-6

        model = Terms()
        model.b.w.requires_grad_(False)
        opt = shard(model, stage, units=units, momentum=0.9)
        model(x).backward()
        opt.step()
        opt.zero_grad()
        assert zero.full_param(model.b.w).item() == 1.0
        assert zero.full_state(model.b.w) == {}
        model.b.w.requires_grad_(True)
        for _ in range(2):
            model(x).backward()
            opt.step()
            opt.zero_grad()
        assert abs(zero.full_param(model.b.w).item() - 0.71) < 1e-6
        assert abs(zero.full_state(model.b.w)["momentum_buffer"].item() - 1.9) < 1e-6


def test_e84_e85_e86_two_models_buffers_and_freezing() -> None:
    run(at_each_stage, 2, _two_networks, _buffers, _frozen_for_a_while)


# E90


class Lends(nn.Module):
    """Uses a child's weight itself, and parameters in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = ones(2, 2)[0]
        self.listed = nn.ParameterList([torch.ones(2, 2), torch.ones(2)])
        self.keyed = nn.ParameterDict({"k": torch.ones(2, 2)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.linear(torch.tanh(self.a(x)), self.a.weight)
        z = F.linear(x, self.listed[0], self.listed[1])
        assert self.a.weight.shape == self.keyed["k"].shape == (2, 2)
        return y.sum() + z.sum() + (self.keyed["k"] * x).sum()


def _weights_elsewhere(rank: int, world: int, stage: int) -> None:
    h = math.tanh(2)
    model = Lends()
    opt = shard(model, stage)
    for _ in range(2):
        model(torch.ones(1, 2)).backward()
        want = torch.full((2, 2), h + 2 * (1 - h * h))
        torch.testing.assert_close(zero.full_grad(model.a.weight), want)
        assert zero.full_grad(model.listed[0]).tolist() == [[1.0, 1.0]] * 2
        assert zero.full_grad(model.listed[1]).tolist() == [1.0, 1.0]
        assert zero.full_grad(model.keyed["k"]).tolist() == [[1.0, 1.0]] * 2
        opt.zero_grad()
    # Outside the model: whole or an error by name, never another shape.
    assert torch.ones(3, 2).mm(model.a.weight).tolist() == [[2.0, 2.0]] * 3
    with torch.no_grad():
        if stage == 3:
            with pytest.raises(RuntimeError, match=r"'keyed\.k' is sharded.*gathered"):
                torch.ones(2, 2).add(model.keyed["k"])
        else:
            assert torch.ones(2, 2).add(model.keyed["k"]).tolist() == [[2.0, 2.0]] * 2


# E91


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.full((2,), 3.0))
        self.child = ones(2, 2)[0]

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.g * self.child(x)

    def generate(self, x: torch.Tensor, count: int) -> torch.Tensor:
        for _ in range(count):
            x = self.encode(self(x))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.encode(x)


def _other_entry_points(rank: int, world: int, stage: int) -> None:
    x = torch.ones(1, 2)
    for units in ([nn.Linear], None):
        inner = Encoder()
        model = zero.ZeroModule(inner, stage=stage, units=units, min_unit_numel=0)
        opt = zero.ZeroOptimizer(model, "sgd", lr=0.0)
        for call in (model, inner, model.encode, inner.encode):
            out = call(x)
            assert out.tolist() == [[6.0, 6.0]]
            out.sum().backward()
            assert zero.full_grad(inner.g).tolist() == [2.0, 2.0]
            assert zero.full_grad(inner.child.weight).tolist() == [[3.0, 3.0]] * 2
            opt.step()
            opt.zero_grad()
        with torch.no_grad():
            assert model.encode(x).tolist() == model(x).tolist() == [[6.0, 6.0]]
            assert model.generate(x, 2).tolist() == [[1296.0, 1296.0]]
            if stage == 3:
                opt.step()  # nothing is gathered after it
                name = r"'child\.weight'" if units is None else "'g'"
                with pytest.raises(RuntimeError, match=name + ".*is sharded.*gathered"):
                    inner.encode(x)
                with zero.gathered(inner):
                    assert inner.encode(x).tolist() == [[6.0, 6.0]]
            else:
                assert inner.encode(x).tolist() == [[6.0, 6.0]]


def test_e90_e91_weights_and_methods_used_elsewhere() -> None:
    run(at_each_stage, 2, _weights_elsewhere, _other_entry_points)
