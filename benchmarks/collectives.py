"""Collectives between processes of one host: torch's own Gloo group, Zero over Gloo ("group") and
over the host's memory ("host"), in one interleaved run.

    python benchmarks/collectives.py [--ranks 2 4] [--rounds 9]

A time is that of one call that is waited for at once, from when the first rank began to when the
last one ended. A bandwidth is the whole tensor's bytes by that time. "memcpy" copies the bytes that
each rank has to get from the others, on all ranks at once, private memory to private memory (twice
for all_reduce): what moving them costs at least; small tensors it finds in the core's own cache. A
shard lies apart from the whole tensor, so all_gather copies each rank's own too. "host/this" is the
median over rounds of host's time by this way's.

"Beside computation": the ranks multiply small matrices until a call is done. "costs" is the time by
which a call puts that computation off, on average over the ranks.

`make build` builds bench_collectives, the program of a rank. Don't run anything else meanwhile.
"""

from __future__ import annotations

import os
import statistics
import sys
from pathlib import Path
from typing import Any

from common import add_program, check_program, figures_of, run_ranks
from plots import BLUE, GREY, ORANGE, PALE_BLUE, pyplot, save, tidy
from results import Result, parser_of, spread

COLORS = {"gloo": ORANGE, "group": PALE_BLUE, "host": BLUE, "memcpy": GREY}
COLLECTIVES = ("reduce_scatter", "all_gather", "all_reduce")
DTYPES = {"Float": "fp32", "BFloat16": "bf16"}
MIB = 2**20

Run = dict[str, Any]  # the document of one start of the program
Case = dict[str, Any]  # one of its "cases"


def measure(program: Path, ranks: int, arguments: list[str], limit: float) -> Run:
    """One start of the program; what rank 0 printed, with a summary of each case."""
    run: Run = run_ranks([str(program), *arguments], ranks, limit)
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
    for unit, size in (("MiB", MIB), ("KiB", 2**10)):
        if case["bytes"] >= size:
            return f"{case['bytes'] / size:.0f} {unit}"
    return f"{case['bytes']} B"


def add_table(result: Result, run: Run) -> None:
    rows = []
    for case in run["cases"]:
        large = case["bytes"] >= MIB
        unit, scale, digits = ("ms", 1e3, 3) if large else ("us", 1e6, 1)
        dtype = DTYPES[case["dtype"]] if case["bytes"] else ""
        for way, figures in case["summary"].items():
            low, high = figures["min"] * scale, figures["max"] * scale
            middle = f"{figures['median'] * scale:.{digits}f}"
            rows.append(
                [
                    " ".join(f"{case['collective']} {dtype} {size_of(case)}, {way}".split()),
                    f"{middle} ({low:.{digits}f}-{high:.{digits}f}) {unit}",
                    f"{figures['gib_per_second']:.2f}" if large else "",
                    f"{figures['host_to_this']:.3f}" if way != "host" else "",
                ]
            )
    transports = ", ".join(run["transports"].values())
    result.table(
        f"collectives-{run['ranks']}",
        f"Collectives of {run['ranks']} ranks on one host (median and range of {run['rounds']} "
        f"rounds; {transports})",
        ["", "time", "GiB/s", "host / this"],
        rows,
    )


def add_beside(result: Result, run: Run) -> None:
    rows = []
    for case in run["cases"]:
        for way, times in case.get("beside", {}).items():
            figures = [spread([1e3 * t for t in times[key]], 3) for key in ("seconds", "taken")]
            name = f"{case['collective']} {DTYPES[case['dtype']]} {size_of(case)}, {way}"
            alone = f"{1e3 * case['summary'][way]['median']:.3f}"
            rows.append([name, alone, *figures])
    result.table(
        f"collectives-beside-{run['ranks']}",
        f"Collectives of {run['ranks']} ranks beside computation, ms a call (median and range of "
        f"{run['rounds']} rounds)",
        ["", "alone", "takes", "costs"],
        rows,
    )


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
    tidy(axes)


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
    tiny = [case for case in run["cases"] if case["bytes"] < 2**10]
    draw_bars(row[-1], tiny, "us")
    names = [f"{case['collective']}\n{size_of(case)}".rstrip() for case in tiny]
    row[-1].set_xticks(range(len(tiny)), names, fontsize=8)
    row[-1].set_title(f"latency, {run['ranks']} ranks", fontsize=10)


def draw(runs: list[Run], path: Path) -> None:
    plt = pyplot()
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
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--kib", type=int, nargs="+", default=[256, 2**10, 2**14, 2**16])
    parser.add_argument("--rounds", type=int, default=9)
    add_program(parser, "bench_collectives")
    options = parser.parse_args()
    check_program(options.program)
    if options.quick:
        options.ranks, options.kib, options.rounds = [2], [1024], 2
    result = Result("collectives", options)
    runs = []
    for ranks in options.ranks:
        numbers = [str(number) for number in (options.rounds, *options.kib)]
        try:
            runs.append(measure(options.program, ranks, numbers, options.limit))
        except RuntimeError as error:
            sys.exit(str(error))
        result.lap()
        add_table(result, runs[-1])
        add_beside(result, runs[-1])
    result.data = {"cores": len(os.sched_getaffinity(0)), "runs": runs}
    draw(runs, result.plot)
    result.write()


if __name__ == "__main__":
    main()
