"""Outputs, checkpoints and repeated backwards: reports by users of other systems (E75-E83)."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from models import (
    Free,
    assert_close,
    assert_gradients,
    mean_of_ranks,
    ones,
    shard,
    train_both,
    weights,
)
from ranks import at_each_stage, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_torch as zero

Pair = namedtuple("Pair", ["y", "rest"])


@dataclass
class Obj:
    y: torch.Tensor
    rest: object


class Bag:
    def __init__(self, y: torch.Tensor) -> None:
        self.y = y


# E75

TEXT, ANY = "some text", object()


class Returns(nn.Module):
    """A layer and what it returns its output in."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        return self.pack(self.layer(x))


class ReturnsAll(nn.Module):
    """Nested containers out of units, and out of the model."""

    PACKS = (
        lambda y: (y, None, TEXT),
        lambda y: Pair(y, ANY),
        lambda y: Bag(y),
        lambda y: {"n": None, "o": [Obj(y, None)], "s": TEXT},
    )
    UNPACKS = (lambda o: o[0], lambda o: o.y, lambda o: o.y, lambda o: o["o"][0].y)

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([Returns(pack) for pack in self.PACKS])

    def forward(self, x: torch.Tensor) -> Any:
        for part, unpack in zip(self.parts, self.UNPACKS, strict=True):
            out = part(x)
            x = unpack(out).tanh()
            if isinstance(out, Pair):
                assert out.rest is ANY
        return {"o": [Obj(x, None)], "n": None, "s": TEXT, "any": ANY, "bag": Bag(x)}


def _outputs(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = ReturnsAll()
    plain = copy.deepcopy(model)
    opt = shard(model, stage, units=[Returns])

    def loss(net: nn.Module, rank: int) -> torch.Tensor:
        out = net(torch.full((2, 3), 1.0 + rank))
        assert type(out) is dict and type(out["o"][0]) is Obj and type(out["bag"]) is Bag
        assert out["n"] is None and out["s"] is TEXT and out["any"] is ANY
        return (out["o"][0].y + out["bag"].y).square().sum()

    for _ in range(2):
        train_both(model, opt, loss, plain, rank, world)
    assert_close(weights(model), weights(plain))


# E77


def _in_place_on_outputs(rank: int, world: int, stage: int) -> None:
    def view(y: torch.Tensor) -> torch.Tensor:
        v = y.squeeze(1)
        v += 1
        return v.square().sum()

    changes: list[tuple[Callable[[torch.Tensor], torch.Tensor], float]] = [
        (view, 6.0),
        (lambda y: torch.relu_(y).sum(), 1.0),
        (lambda y: y.add_(torch.ones(1, 1, 2)).square().sum(), 6.0),
    ]
    for change, want in changes:
        model = ones(2, 2)
        shard_of_it = shard(model, stage)
        for _ in range(2):
            change(model(torch.ones(1, 1, 2))).backward()
            assert zero.full_grad(model[0].weight).tolist() == [[want] * 2] * 2
            shard_of_it.zero_grad()


# E78, E79


def _two_backwards(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.ones(2))
    opt = shard(model, stage, units=None)
    reduction = "reduce_scatter" if stage else "all_reduce"
    for between in (False, True):
        y = (model.w * torch.tensor([1.0, 2.0])).sum()
        sent = [zero.report(opt).as_dict()["traffic"][reduction]]
        for last in (False, True):
            if last and between:
                opt.zero_grad()
            y.backward(retain_graph=not last)
            opt.synchronize()
            sent.append(zero.report(opt).as_dict()["traffic"][reduction])
        assert sent[2] - sent[1] == sent[1] - sent[0] == (64 if stage else 128)
        assert zero.full_grad(model.w).tolist() == ([1.0, 2.0] if between else [2.0, 4.0])
        opt.zero_grad()

    def losses(net: nn.Module, rank: int) -> list[torch.Tensor]:
        y = net(torch.full((1, 2), 1.0 + rank))
        return [y.sum().tanh(), y.square().mean()]

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2))
    want = mean_of_ranks(copy.deepcopy(model), lambda net, r: sum(losses(net, r)), world)
    shard_of_it = shard(model, stage)
    first, second = losses(model, rank)
    first.backward(retain_graph=True)
    second.backward()
    assert_gradients(model, want)
    shard_of_it.zero_grad()


def _several_forwards(rank: int, world: int, stage: int) -> None:
    a, b = math.tanh(2), math.tanh(4)
    for middle in (False, True):
        model = ones(2, 2, 2)
        model.insert(1, nn.Tanh())
        opt = shard(model, stage)
        for _ in range(2):
            loss = model(torch.ones(1, 2)).sum()
            if middle:
                with torch.no_grad():
                    assert torch.equal(model(torch.ones(1, 2)).sum(), loss)
            (loss + model(torch.full((1, 2), 2.0)).sum()).backward()
            first, second = (zero.full_grad(model[i].weight) for i in (0, 2))
            torch.testing.assert_close(second, torch.full((2, 2), a + b))
            want = 2 * (1 - a * a) + 4 * (1 - b * b)
            torch.testing.assert_close(first, torch.full((2, 2), want), rtol=1e-5, atol=1e-6)
            opt.zero_grad()


def test_e75_e77_e78_e79_outputs_and_backwards() -> None:
    run(at_each_stage, 2, _outputs, _in_place_on_outputs, _two_backwards, _several_forwards)


# E81, in units


def _one_layer_in_two_segments(rank: int, world: int, stage: int) -> None:
    for reentrant in (True, False):
        model = ones(2, 2)
        opt = shard(model, stage)
        for _ in range(3):
            x = torch.ones(1, 2, requires_grad=True)
            inner = checkpoint(model[0], x, use_reentrant=reentrant)
            checkpoint(model, inner, use_reentrant=reentrant).sum().backward()
            assert zero.full_grad(model[0].weight).tolist() == [[4.0, 4.0]] * 2, reentrant
            opt.zero_grad()


# E82


def _inference_first(rank: int, world: int, stage: int) -> None:
    model = ones(2, 2, 2)
    start = copy.deepcopy(model.state_dict())
    opt = shard(model, stage)
    x = torch.ones(1, 2)
    for round_ in range(2):
        with torch.inference_mode():
            assert model(x).tolist() == [[4.0, 4.0]]
        with torch.no_grad():
            assert model(x).tolist() == [[4.0, 4.0]]
        model(x).sum().backward()
        for p in model.parameters():
            assert zero.full_grad(p).tolist() == [[2.0, 2.0]] * 2, round_
        opt.step()
        opt.zero_grad()
        with torch.inference_mode():
            want = torch.full((1, 2), 4 * 0.8 * 0.8)
            torch.testing.assert_close(model(x).clone(), want)
        model.load_state_dict(start)
    with torch.inference_mode():
        assert model(x).tolist() == [[4.0, 4.0]]


# E83


def _gradient_penalty(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.ones(()))
    opt = shard(model, stage, units=None)
    x = torch.tensor(1.0 + rank, requires_grad=True)
    (slope,) = torch.autograd.grad(model.w * x * x, x, create_graph=True)
    (local,) = torch.autograd.grad((slope - 1).square(), model.w, retain_graph=True)
    assert local.item() == (4.0, 24.0)[rank] and model.w.grad is None
    (slope - 1).square().backward()
    assert zero.full_grad(model.w).item() == 14.0
    opt.zero_grad()

    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))
    plain = copy.deepcopy(critic)
    opt = shard(critic, stage)

    def loss(net: nn.Module, rank: int) -> torch.Tensor:
        x = torch.linspace(-1, 1 + rank, 6).view(2, 3).requires_grad_()
        score = net(x).sum()
        (slope,) = torch.autograd.grad(score, x, create_graph=True)
        return score + (slope.norm() - 1).square()

    for _ in range(3):
        train_both(critic, opt, loss, plain, rank, world)


def test_e81_e82_e83_checkpoints_inference_and_penalties() -> None:
    run(at_each_stage, 2, _one_layer_in_two_segments, _inference_first, _gradient_penalty)
