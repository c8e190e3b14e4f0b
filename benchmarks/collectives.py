"""Collectives between processes of one host: torch's own Gloo group, Zero over Gloo ("group") and
over the host's memory ("host"), in one interleaved run.

    python benchmarks/collectives.py [--ranks 2 4] [--rounds 9] [--json FILE] [--plot FILE]

A time is that of one call that is waited for at once, from when the first rank began to when the
last one ended. A bandwidth is the whole tensor's bytes by that time. "memcpy" copies the bytes that
each rank has to get from the others, on all ranks at once, private memory to private memory (twice
for all_reduce): what moving them costs at least; small tensors it finds in the core's own cache. A
shard lies apart from the whole tensor, so all_gather copies each rank's own too. "host/this" is the
median over rounds of host's time by this way's.

`make build` builds bench_collectives, the program of a rank. Don't run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import add_program, check_program, figures_of, free_port, note_if_not_quiet

BLUE, PALE_BLUE, ORANGE, GREY = "#2f6db5", "#9dbfe3", "#e07b39", "#b9c0c8"
COLORS = {"gloo": ORANGE, "group": PALE_BLUE, "host": BLUE, "memcpy": GREY}
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
DTYPES = {"Float": "fp32", "BFloat16": "bf16"}
MIB = 2**20

Run = dict[str, Any]  # the document of one start of the program
Case = dict[str, Any]  # one of its "cases"


def measure(program: Path, ranks: int, arguments: list[str], limit: float) -> Run:
    """One start of the program; what rank 0 printed, with a summary of each case."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
            processes.append(
                subprocess.Popen(
                    [str(program), *arguments],
                    env={**os.environ, **shared, **place},
                    stdout=subprocess.DEVNULL if rank else subprocess.PIPE,
                    text=True,
                )
            )
        output = processes[0].communicate(timeout=limit)[0]
        codes = [process.wait(timeout=60) for process in processes]
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"{ranks} ranks took more than {error.timeout:.0f} s") from error
    finally:
        for process in processes:
            process.kill()
    if any(codes):
        raise RuntimeError(f"{ranks} ranks ended with {codes}; see their output above")
    run: Run = json.loads(output)
    for case in run["cases"]:
        case["summary"] = summary(case)
    return run


def summary(case: Case) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = case["seconds"]
    result = {}
    for way, times in seconds.items():
        ratios = [host / time for host, time in zip(seconds["host"], times, strict=True)]
        result[way] = figures_of(times, case["bytes"])
        result[way]["host_to_this"] = statistics.median(ratios)
    return result


# ---- the table ----


def size_of(case: Case) -> str:
    if case["bytes"] == 0:
        return ""
    return f"{case['bytes'] / MIB:.0f} MiB" if case["bytes"] >= MIB else f"{case['bytes']} B"


def print_table(run: Run) -> None:
    transports = ", ".join(run["transports"].values())
    print(f"\n{run['ranks']} ranks, {run['rounds']} rounds; {transports}; torch {run['torch']}")
    print(
        f"{'collective':15s}{'type':6s}{'tensor':>7s}  {'way':7s}{'median':>10s}    "
        f"{'min - max':17s} {'GiB/s':>6s} {'host/this':>9s}"
    )
    for case in run["cases"]:
        large = case["bytes"] >= MIB
        unit, scale, digits = ("ms", 1e3, 3) if large else ("us", 1e6, 1)
        dtype = DTYPES[case["dtype"]] if case["bytes"] else ""
        label = f"{case['collective']:15s}{dtype:6s}{size_of(case):>7s}"
        for way, figures in case["summary"].items():
            low, high = figures["min"] * scale, figures["max"] * scale
            bandwidth = f"{figures['gib_per_second']:6.2f}" if large else " " * 6
            ratio = f"{figures['host_to_this']:9.3f}" if way != "host" else ""
            print(
                f"{label}  {way:7s}{figures['median'] * scale:10.{digits}f} {unit} "
                f"{f'{low:.{digits}f} - {high:.{digits}f}':18s} {bandwidth} {ratio}".rstrip()
            )
            label = " " * len(label)


# ---- the picture ----


def draw_bars(axes: Any, cases: list[Case], unit: str) -> None:
    """A group of bars for each case, a bar for each way; the line spans all rounds."""
    ways = list(cases[0]["summary"])
    width = 0.84 / len(ways)
    for column, way in enumerate(ways):
        heights, below, above = [], [], []
        for case in cases:
            figures = case["summary"][way]
            edges = [
                case["bytes"] / 2**30 / figures[edge] if unit == "GiB/s" else figures[edge] * 1e6
                for edge in ("median", "max", "min")
            ]
            heights.append(edges[0])
            below.append(edges[0] - min(edges))
            above.append(max(edges) - edges[0])
        places = [row + (column - (len(ways) - 1) / 2) * width for row in range(len(cases))]
        axes.bar(
            places,
            heights,
            width * 0.92,
            yerr=[below, above],
            error_kw={"elinewidth": 0.8, "ecolor": "#50565e"},
            color=COLORS[way],
        )
    axes.set_yscale("log")
    axes.set_ylabel(unit)
    axes.grid(axis="y", color="#e6e8eb")
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)


def draw_run(row: Any, run: Run) -> None:
    for axes, collective in zip(row, COLLECTIVES, strict=False):
        cases = [
            case
            for case in run["cases"]
            if case["collective"] == collective and case["bytes"] >= MIB
        ]
        draw_bars(axes, cases, "GiB/s")
        names = [f"{size_of(case)}\n{DTYPES[case['dtype']]}" for case in cases]
        axes.set_xticks(range(len(cases)), names, fontsize=8)
        axes.set_title(f"{collective}, {run['ranks']} ranks", fontsize=10)
    tiny = [case for case in run["cases"] if case["bytes"] < MIB]
    draw_bars(row[-1], tiny, "us")
    names = [f"{case['collective']}\n{size_of(case)}".rstrip() for case in tiny]
    row[-1].set_xticks(range(len(tiny)), names, fontsize=8)
    row[-1].set_title(f"latency, {run['ranks']} ranks", fontsize=10)


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.patches import Patch

    figure, rows = plt.subplots(
        len(runs),
        len(COLLECTIVES) + 1,
        figsize=(17, 0.8 + 3.4 * len(runs)),
        layout="constrained",
        squeeze=False,
        width_ratios=[3, 3, 3, 1.3],
    )
    for row, run in zip(rows, runs, strict=True):
        draw_run(row, run)
    figure.legend(
        handles=[Patch(color=color, label=way) for way, color in COLORS.items()],
        loc="outside upper center",
        ncols=len(COLORS),
        frameon=False,
        title="Collectives on one host: bytes of the tensor by median time; lines span all rounds",
    )
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--mib", type=int, nargs="+", default=[1, 16, 64], help="sizes of tensors")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--plot", type=Path)
    add_program(parser, "bench_collectives")
    arguments = parser.parse_args()
    check_program(arguments.program)
    cores = len(os.sched_getaffinity(0))
    note_if_not_quiet()
    print(f"{cores} cores")
    runs = []
    for ranks in arguments.ranks:
        numbers = [str(number) for number in (arguments.rounds, *arguments.mib)]
        try:
            runs.append(measure(arguments.program, ranks, numbers, arguments.limit))
        except RuntimeError as error:
            sys.exit(str(error))
        print_table(runs[-1])
    if arguments.json:
        arguments.json.write_text(json.dumps({"cores": cores, "runs": runs}, indent=1))
    if arguments.plot:
        draw(runs, arguments.plot)


if __name__ == "__main__":
    main()
