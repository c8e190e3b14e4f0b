"""Bytes that a rank sends in a step, counted by the kernel for all, and by Zero's ledger for Zero.

    python benchmarks/traffic.py [--task small] [--worlds 2 4] [--strategies ...]

All ranks run in a network of their own where the system allows it, and the bytes through its
loopback interface are read between two barriers around the steps, less the barriers' own: headers,
acknowledgements and control messages are in them. Zero's host transport sends nothing through
sockets; its ledger counts what ranks read of each other. Theory is 2 (stages 0 to 2, DDP) or 3
(stage 3, FSDP) times the parameters' bytes times (N-1)/N. What zero3_auto keeps whole between
forward and backward is gathered once, and below that.
"""

from __future__ import annotations

import argparse
import os
import statistics
from typing import Any

import plots
from models import TASKS
from results import Result, parser_of
from sockets import enter_own_network
from steps import add_peers, run_strategy, settle_peers
from strategies import SINGLE, stage_of, transport_of

MIB = 2**20


def theory_of(strategy: str, numel: int, ranks: int) -> float:
    """Bytes that a rank has to send in a step of fp32."""
    stage = stage_of(strategy)
    gathers_twice = stage == 3 or strategy.startswith("fsdp") or strategy == "deepspeed3"
    return (3 if gathers_twice else 2) * 4 * numel * (ranks - 1) / ranks


def ledger_of(run: dict[str, Any]) -> float | None:
    """Bytes that Zero counted, a step."""
    report = run.get("report")
    return sum(report["traffic"].values()) / report["steps"] if report else None


def row_of(strategy: str, runs: list[dict[str, Any]], ranks: int) -> list[str]:
    if any("error" in run for run in runs):
        return [strategy, "failed", "-", "-", "-", "-"]
    theory = theory_of(strategy, runs[0]["numel"], ranks)
    socket = statistics.median(run["traffic"] for run in runs)
    ledger = ledger_of(runs[0])
    return [
        strategy,
        f"{theory / MIB:.3f}",
        f"{socket / MIB:.3f}",
        f"{socket / theory:.3f}",
        "-" if ledger is None else f"{ledger / MIB:.3f}",
        "-" if ledger is None else f"{ledger / theory:.5f}",
    ]


def measure(
    ranks: int, options: argparse.Namespace, result: Result, isolated: bool
) -> dict[str, list[dict[str, Any]]]:
    started = argparse.Namespace(**{**vars(options), "ranks": ranks})
    strategies = [name for name in options.strategies if name not in SINGLE]
    found = {
        name: [
            run_strategy(name, options.task, started, "--count-bytes")
            for _ in range(options.rounds)
        ]
        for name in strategies
    }
    result.lap()
    where = "a network of their own" if isolated else "the machine's network, with others' bytes"
    result.table(
        f"traffic-{ranks}",
        f"MiB that a rank sends in a step, {TASKS[options.task].title}, {ranks} ranks in {where}",
        ["", "theory", "sockets", "to theory", "ledger", "to theory"],
        [row_of(name, runs, ranks) for name, runs in found.items()],
    )
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--task", choices=TASKS, default="small")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    add_peers(parser)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4], help="ranks, in turn")
    options = parser.parse_args()
    if options.quick:
        options.task, options.worlds, options.steps = "tiny", [2], 2
    settle_peers(options)
    isolated = enter_own_network()
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"  # such a network has no names
    result = Result("traffic", options, timed=not isolated)
    found = {ranks: measure(ranks, options, result, isolated) for ranks in options.worlds}
    result.data = {"isolated": isolated, "found": found}
    panels = {
        f"{ranks} ranks": {
            name: [runs[0]["traffic"] / theory_of(name, runs[0]["numel"], ranks)]
            for name, runs in by_name.items()
            if "error" not in runs[0] and (stage_of(name) is None or transport_of(name) == "group")
        }
        for ranks, by_name in found.items()
    }
    plots.bars(result.plot, panels, "bytes through sockets, ratio to theory", line=1.0)
    result.write()


if __name__ == "__main__":
    main()
