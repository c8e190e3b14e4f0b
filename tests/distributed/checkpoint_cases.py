"""A small GPT that is trained, saved and looked at whole."""

from __future__ import annotations

import functools
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from models import batch, loss_of, make_gpt
from torch import nn

import zero_torch as zero

SMALL: dict[str, Any] = {"bucket_bytes": 4096, "first_bucket_bytes": 1024, "min_unit_numel": 0}


def make(stage: int, rule: Any = "adamw", seed: int = 0, **given: Any) -> tuple[nn.Module, Any]:
    model = make_gpt(seed)
    opt = zero.ZeroOptimizer(model, rule, stage=stage, lr=1e-2, timeout=30.0, **SMALL, **given)
    return model, opt


def train(model: nn.Module, opt: Any, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, batch(step, rank)).backward()
        opt.step()
        opt.zero_grad()


def whole(model: nn.Module, opt: Any) -> dict[str, torch.Tensor]:
    values = {name: zero.full_param(p) for name, p in model.named_parameters()}
    for key, state in opt.state_dict()["state"].items():
        values |= {f"{key}.{name}": torch.as_tensor(value) for name, value in state.items()}
    return values


def in_folder(case: Callable[[int, int, int, str], None]) -> Callable[[int, int, int], None]:
    """``case(rank, world, stage, folder)`` with a new folder that all ranks share."""

    @functools.wraps(case)
    def run(rank: int, world: int, stage: int) -> None:
        folders: list[Any] = [tempfile.mkdtemp(prefix="zero-checkpoint-") if rank == 0 else None]
        if dist.is_initialized():
            dist.broadcast_object_list(folders, 0)
        case(rank, world, stage, folders[0])
        if dist.is_initialized():
            dist.barrier()
        if rank == 0:
            shutil.rmtree(folders[0])

    return run
