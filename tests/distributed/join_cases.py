"""Training inside zero.join, and what one process computes for it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from models import mlp, mlp_loss
from torch import nn

import zero_torch as zero


@dataclass(frozen=True)
class Plan:
    """Batches of each rank, and how they are used."""

    batches: Sequence[int]
    over: str = "active"
    micro: int = 1  # batches a step; all but the last in no_sync
    clip: float | None = None
    rule: Any = "sgd"
    stage: int = 0
    model: Callable[[], nn.Module] = mlp
    loss: Callable[[nn.Module, int, int], torch.Tensor] = mlp_loss

    def sharded(self) -> tuple[nn.Module, zero.ZeroOptimizer]:
        model = self.model()
        given = {"lr": 0.1, "momentum": 0.9} if self.rule == "sgd" else {"lr": 0.01}
        units = {"units": [nn.Linear], "min_unit_numel": 0} if self.stage == 3 else {}
        buckets = {"bucket_bytes": 256, "first_bucket_bytes": 64, "timeout": 20.0}
        return model, zero.ZeroOptimizer(
            model, self.rule, stage=self.stage, **given, **units, **buckets
        )

    def plain(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = self.model()
        if self.rule == "sgd":
            return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        cls = torch.optim.AdamW if self.rule == "adamw" else self.rule
        return model, cls(model.parameters(), lr=0.01)


def train(plan: Plan, rank: int) -> list[torch.Tensor]:
    """Whole weights after training inside a join."""
    model, opt = plan.sharded()
    with zero.join(opt, average_over=plan.over):
        for batch in range(plan.batches[rank]):
            if batch % plan.micro < plan.micro - 1:
                with opt.no_sync():
                    plan.loss(model, rank, batch).backward()
                continue
            plan.loss(model, rank, batch).backward()
            if plan.clip is not None:
                opt.clip_grad_norm_(plan.clip)
            opt.step()
            opt.zero_grad()
    return [zero.full_param(p) for p in model.parameters()]


def reference(plan: Plan) -> list[torch.Tensor]:
    """The same of one process: each rank's gradient, summed and divided."""
    model, opt = plan.plain()
    parameters = list(model.parameters())
    begin = 0
    while begin + plan.micro <= max(plan.batches):
        sums: list[torch.Tensor | None] = [None] * len(parameters)
        active = 0
        for rank, batches in enumerate(plan.batches):
            own = range(begin, min(begin + plan.micro, batches))
            active += len(own) > 0
            opt.zero_grad()
            for batch in own:
                plan.loss(model, rank, batch).backward()
            for i, p in enumerate(parameters):
                if p.grad is not None:
                    sums[i] = p.grad.clone() if sums[i] is None else sums[i] + p.grad
        divisor = active if plan.over == "active" else len(plan.batches)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = None if total is None else total / divisor
        if plan.clip is not None:
            torch.nn.utils.clip_grad_norm_(parameters, plan.clip)
        opt.step()
        begin += plan.micro
    return [p.detach().clone() for p in parameters]


def check(plan: Plan, rank: int, rtol: float = 1e-5, atol: float = 1e-6) -> list[torch.Tensor]:
    got, want = train(plan, rank), reference(copy.copy(plan))
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=rtol, atol=atol)
    return got
