"""What benchmarks share: how ranks are started, and figures of repeated times."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
HERE = Path(__file__).resolve().parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# glibc then keeps what is freed for the next use, instead of taking it from the system again.
KEEP_FREED = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(2**32)}


def rank_environment(rank: int, ranks: int, port: int) -> dict[str, str]:
    """One thread a rank, and a launcher's variables."""
    place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    quiet = {"PYTHONWARNINGS": "ignore::FutureWarning"}  # of peers that call torch's older names
    return {**os.environ, **quiet, **shared, **place}


def run_ranks(
    command: Sequence[str],
    ranks: int,
    limit: float = 600,
    variables: Mapping[str, str] | None = None,
) -> Any:
    """Starts ``ranks`` processes, with ``variables`` added to what a launcher sets; the JSON that
    rank 0 printed. RuntimeError says how the ranks
    ended, when one of them failed; the others are ended then."""
    port, shown = free_port(), shlex.join(command)
    processes: list[subprocess.Popen[bytes]] = []
    with tempfile.TemporaryFile("w+") as output:
        try:
            for rank in range(ranks):
                target = subprocess.DEVNULL if rank else output
                environment = rank_environment(rank, ranks, port) | dict(variables or {})
                processes.append(subprocess.Popen(list(command), env=environment, stdout=target))
            _await(processes, limit)
        finally:
            for process in processes:
                process.kill()
                process.wait()
        codes = [process.returncode for process in processes]
        if any(codes):
            raise RuntimeError(f"{shown}: ranks ended with {codes} (limit: {limit:.0f} s)")
        output.seek(0)
        return json_of(output.read())


def _await(processes: list[subprocess.Popen[bytes]], limit: float) -> None:
    """Until all have ended well, one has failed, or the time is over."""
    until = time.monotonic() + limit
    while time.monotonic() < until:
        codes = [process.poll() for process in processes]
        if any(codes) or None not in codes:
            return
        time.sleep(0.02)


def json_of(output: str) -> Any:
    """The document that a program printed, after whatever its libraries printed."""
    try:
        return json.loads(output)
    except json.JSONDecodeError:
        return json.loads(output.splitlines()[-1])


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
    parser.add_argument("--program", type=Path, default=default)
    parser.add_argument("--limit", type=float, default=1800, help="seconds for one start")


def check_program(program: Path) -> None:
    if not program.is_file():
        sys.exit(f"{program} is not built: run `make build`, or name it with --program")
