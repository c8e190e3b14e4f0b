"""A rank of benchmarks: trains a model of models.py by a strategy of strategies.py, prints JSON.

seconds            of each timed step
forward_backward   median seconds of forward and backward; what is left is the optimizer's step
memory             MB over this process when it was idle (torch loaded, group there, no model)
traffic            bytes that all ranks sent through loopback, a step and rank (--count-bytes)
report             Zero's own account
loss               of the last step, as a hexadecimal float
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from memory_use import PeakPss, reset_peak, status_mb
from models import TASKS, Task
from sockets import loopback_bytes
from strategies import SINGLE, Trainer, stage_of, wrap
from torch import nn

WARMUP = 3


def timed_steps(
    trainer: Trainer, task: Task, generator: torch.Generator, steps: int
) -> tuple[list[float], list[float], torch.Tensor]:
    """(seconds of each step, of its forward and backward, the last loss)."""
    whole, first = [], []
    loss = torch.zeros(())
    for _ in range(steps):
        began = time.perf_counter()
        loss = task.loss(trainer.model, generator)
        trainer.backward(loss)
        first.append(time.perf_counter() - began)
        trainer.step()
        whole.append(time.perf_counter() - began)
    trainer.finish()
    return whole, first, loss.detach()


def copy_seconds(numel: int, repeats: int) -> list[float]:
    """Of copying fp32 elements from private memory to private memory."""
    source, target = torch.ones(numel), torch.zeros(numel)
    seconds = []
    for _ in range(WARMUP + repeats):
        began = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - began)
    return seconds[WARMUP:]


def barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


class ByteCounter:
    """Bytes through loopback between two barriers, less what barriers cost themselves."""

    def __init__(self) -> None:
        self.idle = 0.0
        self.idle = min(self._window(lambda: None) for _ in range(3))

    def _window(self, run: Any) -> float:
        barrier()
        before = loopback_bytes()
        barrier()
        run()
        barrier()
        return loopback_bytes() - before - self.idle

    def of(self, run: Any, steps: int) -> float:
        return self._window(run) / (steps * dist.get_world_size())


def train(options: argparse.Namespace) -> dict[str, Any]:
    task = TASKS[options.task]
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()
    barrier()
    idle = {"rss": status_mb("VmRSS"), "pss": PeakPss.now()}
    torch.manual_seed(0)
    model = task.make()
    numel = sum(p.numel() for p in model.parameters())
    trainer = wrap(options.strategy, model, task.block)
    generator = torch.Generator().manual_seed(1 + options.rank)
    timed_steps(trainer, task, generator, WARMUP)
    gc.collect()
    barrier()
    result: dict[str, Any] = {"numel": numel}
    if options.count_bytes:
        counter = ByteCounter()
        result["traffic"] = counter.of(
            lambda: timed_steps(trainer, task, generator, options.steps), options.steps
        )
    reset_peak()
    with PeakPss(enabled=options.pss) as pss:
        seconds, first, loss = timed_steps(trainer, task, generator, options.steps)
        peak = status_mb("VmHWM")
    result |= {
        "seconds": seconds,
        "forward_backward": statistics.median(first),
        "loss": loss.item().hex(),
        "memory": {"peak_rss": peak - idle["rss"], "rss": status_mb("VmRSS") - idle["rss"]},
    }
    if options.pss:
        result["memory"]["peak_pss"] = pss.peak - idle["pss"]
    if stage_of(options.strategy) is not None:
        import zero_torch as zero

        report = zero.report(trainer.optimizer)
        result["report"] = {"steps": report.steps, "transport": report.transport}
        result["report"] |= report.as_dict()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("strategy")
    parser.add_argument("--task", choices=TASKS, default="small")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--pss", action="store_true", help="sample the proportional set size")
    parser.add_argument("--count-bytes", action="store_true")
    parser.add_argument("--copy-numel", type=int, default=0, help="of strategy memcpy")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if options.strategy not in SINGLE:
        dist.init_process_group("gloo", rank=options.rank, world_size=world)
    if options.strategy == "memcpy":
        barrier()
        result = {"seconds": copy_seconds(options.copy_numel, options.steps)}
    else:
        result = train(options)
    barrier()
    if options.rank == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
