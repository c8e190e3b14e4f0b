"""Host time that Zero adds, on one rank.

    OMP_NUM_THREADS=1 python benchmarks/overhead.py [--layers 64] [--rounds 5]

Many tiny layers: the median step, and what it costs per layer over torch's fused AdamW. At stage 3
each layer is a unit, gathered twice a step. Then what the on-use guard costs a GPT that isn't
sharded: with it on and off in turn. Each variant of the first part runs in a process of its own,
since the guard sees every operation of its process; the rounds are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn
from train_step import GPT

VARIANTS = ("torch", "torch_fused", "zero0", "zero1", "zero2", "zero3")
WARMUP = 20


def stepper(variant: str, layers: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(layers)])
    optimizer: torch.optim.Optimizer
    if variant.startswith("torch"):
        fused = True if variant == "torch_fused" else None
        optimizer = torch.optim.AdamW(model.parameters(), fused=fused)
    else:
        import zero_torch as zero

        optimizer = zero.ZeroOptimizer(model, stage=int(variant[-1]), lr=1e-3, min_unit_numel=0)
    x = torch.randn(8, 32)

    def step() -> None:
        model(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def median_of(step: Callable[[], object], steps: int) -> float:
    seconds = []
    for index in range(WARMUP + steps):
        began = time.perf_counter()
        step()
        if index >= WARMUP:
            seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def compare_layers(layers: int, rounds: int, steps: int) -> None:
    times: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    for _ in range(rounds):
        for variant, seconds in times.items():
            command = [sys.executable, __file__, "--variant", variant]
            command += ["--layers", str(layers), "--steps", str(steps)]
            seconds.append(
                float(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
            )
    base = statistics.median(times["torch_fused"])
    for variant, seconds in times.items():
        median = statistics.median(seconds)
        extra = (median - base) / layers * 1e6
        print(f"{variant:12s} {median * 1e3:8.3f} ms  {extra:+7.2f} us a layer over fused")


def compare_guard(steps: int) -> None:
    import zero_torch as zero

    torch.manual_seed(0)
    model = GPT(1024, 256, 6, 128)
    tokens = torch.randint(0, 1024, (4, 129))

    def step() -> None:
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    off, on = [], []
    for _ in range(steps):
        off.append(_timed(step))
        sharded = zero.ZeroModule(nn.Linear(1, 1), stage=3)  # the guard is on while it lives
        on.append(_timed(step))
        del sharded
    ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
    print(
        f"guard on a GPT of 5.3 M parameters: {statistics.median(off) * 1e3:.1f} ms without, "
        f"{statistics.median(on) * 1e3:.1f} ms with it; median ratio {ratio:.4f}"
    )


def _timed(step: Callable[[], object]) -> float:
    step()  # the heap and the caches are the same for both
    began = time.perf_counter()
    step()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.variant:
        print(median_of(stepper(arguments.variant, arguments.layers), arguments.steps))
        return
    compare_layers(arguments.layers, arguments.rounds, arguments.steps)
    compare_guard(40)


if __name__ == "__main__":
    main()
