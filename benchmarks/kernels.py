"""The CPU kernels beside what torch offers for the same work, on one thread and in one interleaved
run: torch's fused AdamW (with casts of gradients and weights where these have 16 bits) by Zero's
one pass, and the gradients' norm.

    python benchmarks/kernels.py [--elements 65536 16777216] [--rounds 21] [--json FILE]

A time is that of one call. A bandwidth is what one pass has to read and write at least, by that
time. "torch/zero" compares the fastest rounds, which were disturbed least. A case of many tensors
is a list of small parameters, which Zero keeps in one flat buffer. The norms differ in precision:
torch's is summed in fp32, Zero's is exact. "scale + norm" is two passes by torch, one by Zero.

`make build` builds bench_kernels. Don't run anything else meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from common import add_program, check_program, figures_of, note_if_not_quiet

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


def print_table(run: Run) -> None:
    print(f"\n{run['rounds']} rounds; torch {run['torch']}")
    print(
        f"{'work':30s}{'elements':>12s}  {'way':6s}{'median':>10s}    "
        f"{'min - max':20s} {'GiB/s':>6s} {'torch/zero':>10s}"
    )
    for case in run["cases"]:
        label = f"{case['case']:30s}{size_of(case):>12s}"
        for way, figures in case["summary"].items():
            median, low, high = (figures[key] * 1e6 for key in ("median", "min", "max"))
            ratio = f"{figures['this_to_zero']:10.2f}" if way != "zero" else ""
            print(
                f"{label}  {way:6s}{median:10.1f} us {f'{low:.1f} - {high:.1f}':20s} "
                f"{figures['gib_per_second']:6.2f} {ratio}".rstrip()
            )
            label = " " * len(label)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--elements", type=int, nargs="+", default=[2**16, 2**24])
    parser.add_argument("--rounds", type=int, default=21)
    add_program(parser, "bench_kernels")
    arguments = parser.parse_args()
    check_program(arguments.program)
    note_if_not_quiet()
    numbers = [str(number) for number in (arguments.rounds, *arguments.elements)]
    try:
        run = measure(arguments.program, numbers, arguments.limit)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))
    print_table(run)
    if arguments.json:
        arguments.json.write_text(json.dumps(run, indent=1))


if __name__ == "__main__":
    main()
