"""Step time of Zero and of its peers, the same models and data, in interleaved rounds.

    python benchmarks/steps.py [--tasks small large many] [--rounds 7] [--strategies ...]

Every figure is a ratio to one plain process (AdamW as torch defaults it) of the same round; medians
over rounds and their range. In each round the bound is measured too: `concurrent` is as many plain
processes with fused AdamW at once, with no communication and an allocator that gives no memory back
to the system, and `bound` adds what copying a stage's theoretical bytes from memory to memory
takes. `bound, sharded` lets each rank update its part of the parameters only, as stages 1 to 3 do.
`zero0_alone` and so on are Zero's ranks at once, each a group of its own: nothing is sent, and all
update all parameters.
With --peers all DeepSpeed runs too, from the environment of --peers-python (`make bench PEERS=all`
installs it). Don't run anything else on the machine.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import plots
from common import HERE, KEEP_FREED, ROOT, run_ranks
from models import TASKS
from results import Result, parser_of, spread
from strategies import DEEPSPEED, SINGLE, STRATEGIES, ZERO, ZERO_ALONE, stage_of

# Of a round, by task: many small parameters take a fraction of the others' time.
STEPS = {"small": 10, "large": 10, "many": 30, "tiny": 2}

# Beside Zero on all ranks: what has to run, where a peer may fail.
OURS = (*SINGLE, *ZERO_ALONE, "concurrent", "memcpy")

Round = dict[str, dict[str, Any]]  # what a rank printed, by strategy
Ratios = dict[str, list[float]]


def run_strategy(strategy: str, task: str, options: argparse.Namespace, *more: str) -> Any:
    """What rank 0 measured; {"error": ...} where a peer does not run."""
    python = sys.executable if strategy not in DEEPSPEED else str(options.peers_python)
    command = [python, str(HERE / "train_step.py"), strategy, "--task", task]
    command += ["--steps", str(options.steps), *more]
    ranks = 1 if strategy in SINGLE else options.ranks
    variables = KEEP_FREED if strategy == "concurrent" else None
    try:
        return run_ranks(command, ranks, options.limit, variables)
    except RuntimeError as error:
        if stage_of(strategy) is not None or strategy in OURS:
            raise
        print(error, file=sys.stderr)
        return {"error": str(error)}


def run_round(index: int, task: str, options: argparse.Namespace) -> Round:
    """All strategies once; each round begins with another one."""
    alone = [f"{name}_alone" for name in ZERO if name in options.strategies and options.ranks > 1]
    others = [name for name in options.strategies if name != "plain"]
    names = ["plain", *others, *alone, "concurrent"]
    turn = index % len(names)
    found: Round = {}
    for name in names[turn:] + names[:turn]:
        found[name] = run_strategy(name, task, options)
    part = found["plain"]["numel"] * (options.ranks - 1) // options.ranks
    found["memcpy"] = run_strategy("memcpy", task, options, "--copy-numel", str(max(1, part)))
    return {name: found[name] for name in [*names, "memcpy"]}


def median_of(run: dict[str, Any]) -> float:
    return statistics.median(run["seconds"])


def bounds_of(found: Round, ranks: int) -> dict[str, float]:
    """Seconds: what no data-parallel step of this machine can be expected to beat."""
    concurrent, copy = found["concurrent"], median_of(found["memcpy"])
    whole, first = median_of(concurrent), concurrent["forward_backward"]
    sharded = first + (whole - first) / ranks
    return {
        "concurrent": whole,
        "bound, stages 0 to 2": whole + 2 * copy,
        "bound, stage 3": whole + 3 * copy,
        "bound, sharded, stages 1 and 2": sharded + 2 * copy,
        "bound, sharded, stage 3": sharded + 3 * copy,
    }


def ratios_of(rounds: list[Round], ranks: int) -> Ratios:
    """To plain of the same round, by strategy and bound."""
    ratios: Ratios = {}
    for found in rounds:
        plain = median_of(found["plain"])
        seconds = {
            name: median_of(run)
            for name, run in found.items()
            if name not in ("memcpy", "concurrent") and "error" not in run
        }
        for name, value in (seconds | bounds_of(found, ranks)).items():
            ratios.setdefault(name, []).append(value / plain)
    return ratios


def rows_of(rounds: list[Round], ratios: Ratios) -> list[list[str]]:
    rows = []
    for name, values in ratios.items():
        seconds = [median_of(found[name]) for found in rounds if "seconds" in found.get(name, {})]
        milliseconds = f"{statistics.median(seconds) * 1e3:.1f}" if seconds else "-"
        rows.append([name, milliseconds, spread(values, 3)])
    failed = {name for found in rounds for name, run in found.items() if "error" in run}
    return rows + [[name, "failed", "-"] for name in sorted(failed)]


def check_losses(rounds: list[Round]) -> None:
    """Zero's stages have to end at the same loss, bit for bit."""
    for found in rounds:
        losses = {run["loss"] for name, run in found.items() if stage_of(name) is not None}
        if len(losses) > 1:
            sys.exit(f"expected the same loss at all stages of Zero, got {sorted(losses)}")


def add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--limit", type=float, default=600, help="seconds for one start")
    parser.add_argument("--peers", choices=["torch", "all"], default="torch")
    default = ROOT / ".venv-peers" / "bin" / "python"
    parser.add_argument("--peers-python", type=Path, default=default, help="has deepspeed")
    choices = STRATEGIES + DEEPSPEED
    parser.add_argument("--strategies", nargs="+", choices=choices, default=STRATEGIES)


def settle_peers(options: argparse.Namespace) -> None:
    if options.quick and options.strategies == STRATEGIES:
        options.strategies = ["plain", "ddp", "fsdp2", "zero0", "zero3_group"]
    if options.peers == "all":
        options.strategies = [*dict.fromkeys(options.strategies + DEEPSPEED)]
    if set(options.strategies) & set(DEEPSPEED) and not options.peers_python.is_file():
        sys.exit(f"{options.peers_python} is missing: `make bench PEERS=all` installs it")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=["small", "large", "many"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, help="timed in a round; by default 10, of many 30")
    add_peers(parser)
    options = parser.parse_args()
    if options.quick:
        options.tasks, options.rounds = ["tiny"], 1
    settle_peers(options)
    asked = options.steps
    for task in options.tasks:
        options.steps = asked or STEPS[task]
        name = f"steps-{task}" + (f"-{options.ranks}" if options.ranks != 2 else "")
        result = Result(name, options)

        def run(index: int, task: str = task) -> Round:
            return run_round(index, task, options)

        rounds = result.rounds(options.rounds, run)
        check_losses(rounds)
        ratios = ratios_of(rounds, options.ranks)
        title = f"{TASKS[task].title}, {options.ranks} ranks"
        result.table(
            name,
            f"Step time, {title}: ratio to one plain process of the same round "
            f"(median and range of {options.rounds} rounds of {options.steps} steps)",
            ["", "ms a step", "to plain"],
            rows_of(rounds, ratios),
        )
        result.data = {"ratios": ratios, "rounds": rounds, "ranks": options.ranks}
        plots.bars(result.plot, {title: ratios}, "step time, ratio to one plain process", line=1.0)
        result.write()


if __name__ == "__main__":
    main()
