"""Runs all benchmarks, or those named, and writes one page of results.

    python benchmarks/run.py [NAME ...] [--quick] [--results DIR] [--peers all] [--again]

`make bench` is this after a build. Every benchmark writes tables, JSON and a plot into the folder
of results (by default benchmarks/results/DATE); README.md there has all tables, the machine, the
versions and the commands. What is in the folder already is not measured again without --again, and
a benchmark that was stopped goes on after its last finished round. A whole run takes hours: don't
use the machine meanwhile. --quick shows in minutes that everything works, with meaningless
numbers, in a folder of its own.
"""

from __future__ import annotations

import shlex
import subprocess
import sys

from common import HERE
from page import write_page
from results import parser_of

# By name: the file, its arguments, and what it writes (without .json).
BENCHMARKS: dict[str, tuple[list[str], list[str]]] = {
    "instructions": (["instructions.py"], ["instructions"]),
    "kernels": (["kernels.py"], ["kernels"]),
    "collectives": (["collectives.py"], ["collectives"]),
    "overhead": (["overhead.py"], ["overhead"]),
    "startup": (["startup.py"], ["startup"]),
    "steps": (["steps.py"], ["steps-small", "steps-large", "steps-many"]),
    "steps-4": (
        ["steps.py", "--ranks", "4", "--tasks", "small", "--rounds", "3"],
        ["steps-small-4"],
    ),
    "memory": (["memory.py"], ["memory-small", "memory-large"]),
    "traffic": (["traffic.py"], ["traffic"]),
    "ranks": (["ranks.py"], ["ranks"]),
    "checkpoint": (["checkpoint.py"], ["checkpoint-large"]),
    "scaling_model": (["scaling_model.py"], ["scaling_model"]),
}
WITH_PEERS = ("steps", "steps-4", "memory", "traffic")
ALWAYS = ("scaling_model",)  # reads what the others wrote


def command_of(name: str, arguments: list[str], shared: list[str], peers: str) -> list[str]:
    file, *more = arguments
    with_peers = ["--peers", peers] if name in WITH_PEERS else []
    return [sys.executable, str(HERE / file), *more, *with_peers, *shared]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(BENCHMARKS)}; all by default")
    parser.add_argument("--peers", choices=["torch", "all"], default="torch")
    options = parser.parse_args()
    unknown = sorted(set(options.names) - set(BENCHMARKS))
    if unknown:
        parser.error(f"expected names of {', '.join(BENCHMARKS)}, got {', '.join(unknown)}")
    if options.quick and options.results == parser.get_default("results"):
        options.results = options.results.with_name(f"{options.results.name}-quick")
    shared = ["--results", str(options.results)]
    shared += ["--quick"] * options.quick + ["--again"] * options.again
    failed = []
    print(f"results: {options.results}")
    for name in options.names or BENCHMARKS:
        arguments, written = BENCHMARKS[name]
        done = all((options.results / f"{part}.json").is_file() for part in written)
        if done and not options.again and name not in ALWAYS:
            print(f"{name}: is in {options.results} already")
            continue
        command = command_of(name, arguments, shared, options.peers)
        print(f"\n==== {name}: {shlex.join(command)}", flush=True)
        if subprocess.run(command).returncode:
            failed.append(name)
    print(f"\nAll tables: {write_page(options.results)}")
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
