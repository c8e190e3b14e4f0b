"""What it takes to start: imports, and wrapping a model of many small parameters.

    python benchmarks/startup.py [--parameters 1000 10000 100000] [--ranks 2] [--rounds 5]

An import is timed in a fresh process; the first column of the second table is a small model's first
wrapping, with all that it imports. "construct" is from the model to the optimizer, on all ranks, of
a process that did that before; "first step" what the first step takes longer than the third: DDP
and FSDP2 leave work to it. Blocks of 20 parameters are FSDP2's units and Zero's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from typing import Any

import plots
from common import run_ranks
from results import Result, parser_of, spread
from strategies import ZERO

IMPORTS = {
    "torch": "torch",
    "DDP": "torch, torch.nn.parallel, torch.distributed, torch.optim",
    "FSDP2": "torch, torch.distributed.fsdp, torch.distributed.device_mesh, torch.optim",
    "zero_torch": "torch, zero_torch",
}
STRATEGIES = ["ddp", "fsdp2", *ZERO]
PER_BLOCK, WIDTH = 20, 8


# ---- a rank ----


def run_rank(options: argparse.Namespace) -> None:
    import torch
    import torch.distributed as dist
    from models import Cell, Cells
    from strategies import wrap

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    began = time.perf_counter()
    wrap(options.strategy, Cells(1, WIDTH, PER_BLOCK), Cell)  # with what it imports
    cold = time.perf_counter() - began
    model = Cells(max(1, options.parameters[0] // PER_BLOCK), WIDTH, PER_BLOCK)
    dist.barrier()
    began = time.perf_counter()
    trainer = wrap(options.strategy, model, Cell)
    dist.barrier()
    construct = time.perf_counter() - began
    steps = []
    for _ in range(3):
        began = time.perf_counter()
        trainer.backward(trainer.model(torch.ones(2, WIDTH)).sum())
        trainer.step()
        dist.barrier()
        steps.append(time.perf_counter() - began)
    if os.environ["RANK"] == "0":
        first = max(0.0, steps[0] - steps[2])
        found = {"cold": cold, "construct": construct, "first": first, "step": steps[2]}
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


# ---- all of them ----


def import_seconds(modules: str) -> float:
    code = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
    run = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True
    )
    return float(run.stdout)


def construct(strategy: str, parameters: int, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--strategy", strategy, "--parameters", str(parameters)]
    try:
        found: dict[str, float] = run_ranks(command, options.ranks, options.limit)
    except RuntimeError as error:
        if strategy in ZERO:
            raise
        print(error, file=sys.stderr)
        return {}
    return found


def add_tables(result: Result, rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    rows = []
    base = statistics.median(found["imports"]["torch"] for found in rounds)
    for name in IMPORTS:
        seconds = [found["imports"][name] for found in rounds]
        rows.append([name, spread(seconds), f"{statistics.median(seconds) - base:+.2f}"])
    result.table("imports", "Seconds that an import takes", ["", "seconds", "over torch"], rows)
    rows = []
    for strategy in STRATEGIES:
        every = [
            found["construct"][f"{strategy} {n}"] for found in rounds for n in options.parameters
        ]
        row = [strategy, spread([run["cold"] for run in every if run], 3)]
        for parameters in options.parameters:
            runs = [found["construct"][f"{strategy} {parameters}"] for found in rounds]
            row += [spread([r[what] for r in runs if r], 3) for what in ("construct", "first")]
        rows.append(row)
    columns = [
        f"{what}, {parameters:,}"
        for parameters in options.parameters
        for what in ("construct", "first step")
    ]
    result.table(
        "construction",
        f"Seconds to wrap a model, by its number of parameters, {options.ranks} ranks",
        ["", f"{PER_BLOCK} in a new process", *columns],
        rows,
    )


def draw(result: Result, rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    panel = {}
    for strategy in STRATEGIES:
        points = []
        for parameters in options.parameters:
            runs = [found["construct"][f"{strategy} {parameters}"] for found in rounds]
            seconds = [run["construct"] + run["first"] for run in runs if run]
            if seconds:
                points.append((parameters, statistics.median(seconds)))
        panel[strategy] = points
    title = "construction and what the first step takes longer"
    plots.lines(result.plot, {title: panel}, "parameters", "seconds")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--parameters", type=int, nargs="+", default=[1000, 10000, 100000])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one start")
    parser.add_argument("--strategy", choices=STRATEGIES, help="this is a rank of it")
    options = parser.parse_args()
    if options.strategy:
        run_rank(options)
        return
    if options.quick:
        options.parameters, options.rounds = [200], 1
    result = Result("startup", options)

    def run(_: int) -> dict[str, Any]:
        return {
            "imports": {name: import_seconds(modules) for name, modules in IMPORTS.items()},
            "construct": {
                f"{strategy} {parameters}": construct(strategy, parameters, options)
                for parameters in options.parameters
                for strategy in STRATEGIES
            },
        }

    rounds = result.rounds(options.rounds, run)
    add_tables(result, rounds, options)
    result.data = {"rounds": rounds}
    draw(result, rounds, options)
    result.write()


if __name__ == "__main__":
    main()
