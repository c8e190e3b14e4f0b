"""Peak memory of a rank on a GPU: the same in every step, and what docs/concepts.md says."""

from __future__ import annotations

import gc

import torch
from fake_group import DEPTH, LAYER, layers, shard, use_fake_group
from ranks import run

RANKS = 8
SLACK = LAYER // 4  # activations of a few rows, events, counters
# Whole layers that are there beside the table: the open buckets, and stage 3's gathered units.
WINDOW = {0: 0, 1: 0, 2: 3, 3: 5}


def _held(stage: int) -> int:
    """Parameters, gradients and two moments, by the table."""
    sharded = {0: 0, 1: 2, 2: 3, 3: 4}[stage]
    return DEPTH * LAYER * (4 - sharded) + DEPTH * LAYER * sharded // RANKS


def _peaks(rank: int, world: int) -> None:
    use_fake_group(RANKS)
    x = torch.randn(2, layers("cuda", depth=1)[0].in_features, device="cuda")
    warm = layers("cuda", depth=1)
    warm(x).sum().backward()  # cuBLAS has its workspace from here on
    del warm
    for stage in range(4):
        gc.collect()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        model = layers("cuda")
        opt = shard(model, stage)
        peaks = []
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()
            peaks.append(torch.cuda.max_memory_allocated() - before)
        assert len(set(peaks[2:])) == 1, (stage, peaks)
        allowed = _held(stage) + WINDOW[stage] * LAYER + SLACK
        assert peaks[-1] <= allowed, (stage, peaks[-1] / LAYER, allowed / LAYER)
        del model, opt


def test_the_peak_is_the_same_in_every_step_and_within_the_formula() -> None:
    run(_peaks, 1)
