"""Peak memory of a rank while it trains, for Zero and its peers, and Zero's account next to theory.

    python benchmarks/memory.py [--tasks small large] [--strategies ...]

MB (2^20 bytes) over what the same process held before it had a model: torch loaded, the process
group there. RSS counts every page that a process maps, PSS shares those that several map: what
ranks read of each other through the host's memory is not counted twice in it. Peaks are of the
steps after the third; the largest of --rounds runs is shown. About 70 MB of the peers' is
torch._dynamo, which torch's optimizers import.
"""

from __future__ import annotations

from typing import Any

import plots
from models import TASKS
from results import Result, parser_of
from steps import add_peers, run_strategy, settle_peers
from strategies import stage_of

MIB = 2**20
KINDS = ["parameters", "gradients", "optimizer_state", "buffers"]

Runs = dict[str, list[dict[str, Any]]]


def largest(runs: list[dict[str, Any]], kind: str) -> float:
    return max(run["memory"][kind] for run in runs)


def memory_rows(found: Runs) -> list[list[str]]:
    rows = []
    for name, runs in found.items():
        if any("error" in run for run in runs):
            rows.append([name, "failed", "-", "-"])
            continue
        kinds = ("peak_rss", "peak_pss", "rss")
        rows.append([name, *(f"{largest(runs, kind):.0f}" for kind in kinds)])
    return rows


def account_rows(found: Runs) -> list[list[str]]:
    """Zero's own account of what it holds between steps, and of its peak in one, by theory."""
    rows = []
    for name, runs in found.items():
        if stage_of(name) is None:
            continue
        report = runs[0]["report"]
        held, peak = sum(report["held"].values()), sum(report["peak"].values())
        theory = sum(report["theory"]["held"].values())
        parts = [f"{report['held'][kind] / MIB:.1f}" for kind in KINDS]
        ratio = f"{held / theory:.3f}" if theory else "-"
        rows.append(
            [name, *parts, f"{held / MIB:.1f}", f"{theory / MIB:.1f}", ratio, f"{peak / MIB:.1f}"]
        )
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["small", "large"])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=6)
    add_peers(parser)
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.rounds, options.steps = ["tiny"], 1, 2
    settle_peers(options)
    for task in options.tasks:
        result = Result(f"memory-{task}", options)

        def run(_: int, task: str = task) -> dict[str, Any]:
            return {name: run_strategy(name, task, options, "--pss") for name in options.strategies}

        rounds = result.rounds(options.rounds, run)
        found: Runs = {name: [r[name] for r in rounds] for name in rounds[0]}
        title = f"{TASKS[task].title}, {options.ranks} ranks"
        result.table(
            f"memory-{task}",
            f"Peak memory of rank 0, {title}: MB over an idle torch process",
            ["", "peak RSS", "peak PSS", "RSS after"],
            memory_rows(found),
        )
        result.table(
            f"account-{task}",
            f"Zero's account, {title}: MB held between steps, theory, and the peak in a step",
            ["", *KINDS, "held", "theory", "held / theory", "peak"],
            account_rows(found),
        )
        result.data = {"found": found}
        peaks = {
            name: [run["memory"]["peak_rss"] for run in runs]
            for name, runs in found.items()
            if all("error" not in run for run in runs)
        }
        plots.bars(result.plot, {title: peaks}, "peak RSS over an idle torch process, MB")
        result.write()


if __name__ == "__main__":
    main()
