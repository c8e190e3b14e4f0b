"""torch's "fake" process group: this rank does its part, the other ranks are not there."""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import zero_torch as zero

WIDTH, DEPTH = 2048, 8
LAYER = 4 * WIDTH * WIDTH


def use_fake_group(ranks: int) -> None:
    """In place of the default group. From here on this process is rank 0 of ``ranks``."""
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def layers(device: str = "cpu", width: int = WIDTH, depth: int = DEPTH) -> nn.Sequential:
    return nn.Sequential(
        *[nn.Linear(width, width, bias=False, device=device) for _ in range(depth)]
    )


def shard(model: nn.Module, stage: int, **settings: object) -> zero.ZeroOptimizer:
    """Each layer is a unit and a bucket."""
    size = sum(p.numel() * p.element_size() for p in model[0].parameters())
    given = {"lr": 1e-4, "bucket_bytes": size, "first_bucket_bytes": size, "min_unit_numel": 0}
    return zero.ZeroOptimizer(model, stage=stage, **(given | settings))
