"""Bytes held and sent by 1 to 8 ranks, and that all stages compute the same.

    python benchmarks/ranks.py [--task small] [--worlds 1 2 4 8]

More ranks than cores: times mean nothing here and are not shown. At each number of ranks the loss
after the last step has to be the same at all four stages, bit for bit.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import plots
from models import TASKS
from results import Result, parser_of
from steps import run_strategy
from strategies import ZERO

MIB = 2**20


def row_of(ranks: int, strategy: str, run: dict[str, Any]) -> list[str]:
    report = run["report"]
    held, peak = sum(report["held"].values()), sum(report["peak"].values())
    theory = sum(report["theory"]["held"].values())
    sent = sum(report["traffic"].values()) / max(1, report["steps"])
    wanted = report["theory"]["traffic"]
    return [
        f"{ranks} ranks, {strategy}",
        f"{held / MIB:.2f}",
        f"{theory / MIB:.2f}",
        f"{held / theory:.3f}",
        f"{peak / MIB:.2f}",
        f"{sent / MIB:.3f}",
        f"{wanted / MIB:.3f}",
        f"{sent / wanted:.5f}" if wanted else "-",
        run["loss"],
    ]


def check(ranks: int, runs: dict[str, dict[str, Any]]) -> None:
    losses = {strategy: run["loss"] for strategy, run in runs.items()}
    if len(set(losses.values())) > 1:
        sys.exit(f"expected the same loss at all stages with {ranks} ranks, got {losses}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=TASKS, default="small")
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 2, 3, 4, 8])
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, default=900, help="seconds for one start")
    options = parser.parse_args()
    if options.quick:
        options.task, options.worlds, options.steps = "tiny", [1, 3], 2
    result = Result("ranks", options, timed=False)

    def run(index: int) -> dict[str, Any]:
        started = argparse.Namespace(**{**vars(options), "ranks": options.worlds[index]})
        return {name: run_strategy(name, options.task, started) for name in ZERO}

    rounds = result.rounds(len(options.worlds), run)
    by_ranks = dict(zip(options.worlds, rounds, strict=True))
    for ranks, runs in by_ranks.items():
        check(ranks, runs)
    result.table(
        "ranks",
        f"MiB that a rank holds between steps (with the buffers of live units, which theory leaves "
        f"out), at its peak, and sends in a step, {TASKS[options.task].title}",
        ["", "held", "theory", "ratio", "peak", "sent", "theory", "ratio", "loss"],
        [row_of(n, strategy, r) for n, runs in by_ranks.items() for strategy, r in runs.items()],
    )
    result.data = {"found": by_ranks}
    panel = {
        strategy: [
            (ranks, sum(runs[strategy]["report"]["held"].values()) / MIB)
            for ranks, runs in by_ranks.items()
        ]
        for strategy in ZERO
    }
    plots.lines(result.plot, {"held between steps": panel}, "ranks", "MiB")
    result.write()


if __name__ == "__main__":
    main()
