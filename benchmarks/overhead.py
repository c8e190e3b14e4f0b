"""Host time that Zero adds: many tiny layers on one rank, against plain torch.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [--layers 64]

Prints the median step, and what it costs per layer over torch's fused AdamW, with
all variants interleaved step by step.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn

import zero_torch as zero


def network(layers: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)])


def stepper(model: nn.Module, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    x = torch.randn(8, 32)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    variants = {}
    for name, fused in (("torch", None), ("torch_fused", True)):
        model = network(arguments.layers)
        variants[name] = stepper(model, torch.optim.AdamW(model.parameters(), fused=fused))
    for stage in (0, 1, 2):
        model = network(arguments.layers)
        variants[f"zero{stage}"] = stepper(model, zero.ZeroOptimizer(model, stage=stage, lr=1e-3))
    times: dict[str, list[float]] = {name: [] for name in variants}
    for index in range(20 + arguments.steps):
        for name, step in variants.items():
            began = time.perf_counter()
            step()
            if index >= 20:
                times[name].append(time.perf_counter() - began)
    base = statistics.median(times["torch_fused"])
    for name, seconds in times.items():
        median = statistics.median(seconds)
        extra = (median - base) / arguments.layers * 1e6
        print(f"{name:12s} {median * 1e3:8.3f} ms  {extra:+7.2f} us a layer over fused")


if __name__ == "__main__":
    main()
