"""What benchmarks share: ports, a word about a busy machine, and figures of repeated times."""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def note_if_not_quiet() -> None:
    load = os.getloadavg()[0]
    if load > 0.5:
        print(f"note: the machine is not quiet (load {load:.2f}); timings will be off")


def figures_of(times: list[float], size: int) -> dict[str, float]:
    """Of seconds that something took which moves ``size`` bytes."""
    median = statistics.median(times)
    return {
        "median": median,
        "min": min(times),
        "max": max(times),
        "gib_per_second": size / 2**30 / median,
    }


def add_program(parser: argparse.ArgumentParser, name: str) -> None:
    """The options of a benchmark that starts a program which ``make build`` built."""
    default = ROOT / "build" / version("torch") / name
    parser.add_argument("--json", type=Path)
    parser.add_argument("--program", type=Path, default=default)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one start")


def check_program(program: Path) -> None:
    if not program.is_file():
        sys.exit(f"{program} is not built: run `make build`, or name it with --program")
