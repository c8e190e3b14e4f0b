"""Backward's gradients reuse pages: the system makes no new ones in each step."""

from __future__ import annotations

import resource

import pytest
import torch
from ranks import run
from torch import nn

import zero_torch as zero

WIDTH, DEPTH = 1200, 6  # gradients of 5.5 MiB: above the heap's limit at stage 3
PAGES = DEPTH * 4 * WIDTH * WIDTH // resource.getpagesize()


@pytest.fixture(autouse=True)
def _heap_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"):
        monkeypatch.delenv(name, raising=False)


def _count(rank: int, world: int, stage: int) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH)])
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-3)
    batch = torch.full((2, WIDTH), 1.0 + rank)

    def faults_of_a_step() -> int:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        model(batch).square().sum().backward()
        opt.step()
        opt.zero_grad()
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    for _ in range(3):
        faults_of_a_step()
    fewest = min(faults_of_a_step() for _ in range(3))
    assert fewest < PAGES // 3, f"{fewest} page faults at stage {stage}, gradients have {PAGES}"


@pytest.mark.parametrize("stage", range(4))
def test_gradients_need_no_new_pages(stage: int) -> None:
    run(_count, 2, stage)
