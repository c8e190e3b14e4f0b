"""Models for tests of stage 3, and the arithmetic of what their units take."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from models import batch, loss_of, weights
from torch import nn

import zero_torch as zero

WHOLE = {"min_unit_numel": 0}  # each block its own unit, however small


def padded_bytes(unit: Iterable[torch.Tensor], world: int) -> int:
    """Bytes of a unit's flat buffers: one for each dtype, parameters at multiples of 64 bytes."""
    used: dict[torch.dtype, int] = {}
    for p in unit:
        start = used.get(p.dtype, 0)
        used[p.dtype] = start + -(-p.numel() * p.itemsize // 64) * 64
    return sum(-(-size // (64 * world)) * 64 * world for size in used.values())


def units_of_gpt(model: nn.Module) -> list[list[nn.Parameter]]:
    blocks = [list(block.parameters()) for block in model.blocks]
    inside = {id(p) for block in blocks for p in block}
    return [[p for p in model.parameters() if id(p) not in inside], *blocks]


def square_layers(count: int = 10, width: int = 64) -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(count)])


class Wander(nn.Module):
    """Visits its blocks in the order it is given, as often as it is told."""

    def __init__(self, count: int = 5, width: int = 9) -> None:
        super().__init__()
        self.enter = nn.Linear(width, width)
        self.blocks = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count)]
        )
        self.leave = nn.Linear(width, 3)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        x = self.enter(x)
        for index in order:
            x = x + self.blocks[index](x)
        return self.leave(x)


def wander(seed: int = 0) -> Wander:
    torch.manual_seed(seed)
    return Wander()


def train_gpt(
    model: nn.Module, stage: int, rank: int, steps: int = 20, **settings: object
) -> tuple[dict[str, torch.Tensor], list[float], list[float]]:
    """(weights, losses of this rank, gradient norms) of a small GPT's training."""
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **WHOLE, **settings)
    losses, norms = [], []
    for step in range(steps):
        loss = loss_of(model, batch(step, rank))
        loss.backward()
        losses.append(loss.item())
        norms.append(float(opt.clip_grad_norm_(0.5)))
        opt.step()
        opt.zero_grad()
    return weights(model), losses, norms
