"""A small GPT and other models, data, and what one process computes for all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import zero_torch as zero


class Free(nn.Module):
    """Free parameters by name."""

    def __init__(self, **values: torch.Tensor) -> None:
        super().__init__()
        for name, value in values.items():
            self.register_parameter(name, nn.Parameter(value))


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tied embedding and head, sizes that no world size divides."""

    def __init__(self, vocab: int = 53, width: int = 11, depth: int = 2, context: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def mlp(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 19), nn.Tanh(), nn.Linear(19, 7), nn.Linear(7, 3))


def mlp_loss(model: nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return model(torch.randn(4, 5, generator=generator)).square().mean()


def poison(
    parameter: nn.Parameter, element: int, value: float
) -> torch.utils.hooks.RemovableHandle:
    """From now on one element of this rank's gradient is ``value``."""
    bad = torch.zeros(parameter.shape)
    bad.view(-1)[element] = value
    return parameter.register_hook(lambda gradient: gradient + bad)


def ones(*widths: int) -> nn.Sequential:
    """Linear layers of ones, without biases."""
    layers = [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(widths)]
    for layer in layers:
        nn.init.ones_(layer.weight)
    return nn.Sequential(*layers)


def shard(model: nn.Module, stage: int, **settings: Any) -> zero.ZeroOptimizer:
    """With plain SGD; at stage 3 each Linear is a unit of its own."""
    given = {"lr": 0.1, "units": [nn.Linear], "min_unit_numel": 0, "timeout": 20.0, **settings}
    return zero.ZeroOptimizer(model, "sgd", stage=stage, **given)


def train_both(
    model: nn.Module,
    opt: zero.ZeroOptimizer,
    loss: Callable[[nn.Module, int], torch.Tensor],
    plain: nn.Module,
    rank: int,
    world: int,
) -> None:
    """One step of SGD, lr 0.1, by both, whose gradients must agree."""
    want = _step_against(model, opt, loss, plain, rank, world)
    with torch.no_grad():
        for name, p in plain.named_parameters():
            if want[name] is not None:
                p -= 0.1 * want[name]


def step_both(
    model: nn.Module,
    opt: zero.ZeroOptimizer,
    loss: Callable[[nn.Module, int], torch.Tensor],
    plain: nn.Module,
    other: torch.optim.Optimizer,
    rank: int,
    world: int,
) -> None:
    """One step of both optimizers, whose gradients must agree."""
    want = _step_against(model, opt, loss, plain, rank, world)
    for name, p in plain.named_parameters():
        p.grad = want[name]
    other.step()


def _step_against(
    model: nn.Module,
    opt: zero.ZeroOptimizer,
    loss: Callable[[nn.Module, int], torch.Tensor],
    plain: nn.Module,
    rank: int,
    world: int,
) -> dict[str, torch.Tensor | None]:
    """A step of the sharded model; the gradients that it must have had, from one process."""
    want = mean_of_ranks(plain, loss, world)
    loss(model, rank).backward()
    assert_gradients(model, want)
    opt.step()
    opt.zero_grad()
    return want


def make_gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


def batch(step: int, rank: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, 53, (3, 9), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mean_gradients(model: nn.Module, step: int, world: int) -> list[torch.Tensor]:
    """Each rank's gradient by itself, summed in rank order, divided by the ranks."""
    total: list[torch.Tensor] = []
    for rank in range(world):
        model.zero_grad()
        loss_of(model, batch(step, rank)).backward()
        own = [p.grad.clone() for p in model.parameters()]
        total = own if rank == 0 else [a + b for a, b in zip(total, own, strict=True)]
    return [gradient / world for gradient in total]


def mean_of_ranks(
    model: nn.Module, loss: Callable[[nn.Module, int], torch.Tensor], world: int
) -> dict[str, torch.Tensor | None]:
    """Gradients by name: of ``loss(model, rank)`` by itself, summed over ranks, divided by them."""
    total: dict[str, torch.Tensor | None] = {}
    for rank in range(world):
        model.zero_grad()
        loss(model, rank).backward()
        for name, p in model.named_parameters():
            if p.grad is not None:
                known = total.get(name)
                total[name] = p.grad.clone() if known is None else known + p.grad
            total.setdefault(name, None)
    return {name: None if g is None else g / world for name, g in total.items()}


def assert_gradients(model: nn.Module, want: dict[str, torch.Tensor | None]) -> None:
    """The sharded model's whole gradients, by name."""
    for name, p in model.named_parameters():
        got = zero.full_grad(p)
        if want[name] is None:
            assert got is None and p.grad is None, name
        else:
            torch.testing.assert_close(
                got, want[name], rtol=1e-6, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
            )


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max()}"


def assert_close(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol)
