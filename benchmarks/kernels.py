"""The CPU kernels beside what torch offers for the same work, on one thread and in one interleaved
run: torch's fused AdamW (with casts of gradients and weights where these have 16 bits) by Zero's
one pass, and the gradients' norm.

    python benchmarks/kernels.py [--elements 65536 16777216] [--rounds 21]

A time is that of one call. A bandwidth is what one pass has to read and write at least, by that
time. "torch/zero" compares the fastest rounds, which were disturbed least. A case of many tensors
is a list of small parameters, which Zero keeps in one flat buffer. The norms differ in precision:
torch's is summed in fp32, Zero's is exact. "scale + norm" is two passes by torch, one by Zero.

`make build` builds bench_kernels. Don't run anything else meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import add_program, check_program, figures_of
from plots import BLUE, GREY, pyplot, save, tidy
from results import Result, parser_of

Run = dict[str, Any]  # the document that the program prints
Case = dict[str, Any]  # one of its "cases"


def measure(program: Path, arguments: list[str], limit: float) -> Run:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        [str(program), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=limit,
    ).stdout
    run: Run = json.loads(output)
    for case in run["cases"]:
        case["summary"] = summary(case)
    return run


def summary(case: Case) -> dict[str, dict[str, float]]:
    seconds: dict[str, list[float]] = case["seconds"]
    result = {}
    for way, times in seconds.items():
        result[way] = figures_of(times, case["bytes"])
        result[way]["this_to_zero"] = min(times) / min(seconds["zero"])
    return result


def size_of(case: Case) -> str:
    elements = case["elements"]
    if case["tensors"] > 1:
        return f"{case['tensors']} x {elements // case['tensors']}"
    return f"{elements / 2**20:.0f} Mi" if elements >= 2**20 else f"{elements / 2**10:.0f} Ki"


def add_table(result: Result, run: Run) -> None:
    rows = []
    for case in run["cases"]:
        for way, figures in case["summary"].items():
            median, low, high = (figures[key] * 1e6 for key in ("median", "min", "max"))
            ratio = f"{figures['this_to_zero']:.2f}" if way != "zero" else ""
            label = f"{case['case']}, {size_of(case)}, {way}"
            times = f"{median:.1f} ({low:.1f}-{high:.1f})"
            rows.append([label, times, f"{figures['gib_per_second']:.2f}", ratio])
    result.table(
        "kernels",
        f"CPU kernels, one thread (median and range of {run['rounds']} rounds)",
        ["", "us", "GiB/s", "torch / zero"],
        rows,
    )


def draw(run: Run, path: Path) -> None:
    """How many times as long the other way takes, by case."""
    figure, axes = pyplot().subplots(
        figsize=(8, 0.8 + 0.25 * len(run["cases"])), layout="constrained"
    )
    for row, case in enumerate(run["cases"]):
        others = [way for way in case["summary"] if way != "zero"]
        for way in others[:1]:
            ratio = case["summary"][way]["this_to_zero"]
            axes.barh(row, ratio, 0.7, color=BLUE if ratio >= 1 else GREY)
    labels = [f"{case['case']}, {size_of(case)}" for case in run["cases"]]
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.axvline(1.0, color="#50565e", linewidth=0.8)
    axes.set_xlabel("torch's time by Zero's, fastest rounds")
    tidy(axes)
    save(figure, path)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--elements", type=int, nargs="+", default=[2**16, 2**24])
    parser.add_argument("--rounds", type=int, default=21)
    add_program(parser, "bench_kernels")
    options = parser.parse_args()
    check_program(options.program)
    if options.quick:
        options.elements, options.rounds = [2**12], 3
    result = Result("kernels", options)
    numbers = [str(number) for number in (options.rounds, *options.elements)]
    try:
        run = measure(options.program, numbers, options.limit)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))
    add_table(result, run)
    result.data = run
    draw(run, result.plot)
    result.write()


if __name__ == "__main__":
    main()
