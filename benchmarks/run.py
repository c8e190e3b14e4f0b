"""Step time and memory of Zero against plain torch and torch's own data-parallel
systems: the same model and data, in one interleaved run.

    python benchmarks/run.py [--model small|large] [--rounds 3] [--json FILE]

Prints a table of medians as ratios to one plain process (AdamW as torch defaults
it) that ran in the same round, and each rank's peak memory over an idle torch
process. Don't run anything else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from common import free_port, note_if_not_quiet

HERE = Path(__file__).parent
STRATEGIES = [
    "plain",
    "plain_fused",
    "ddp",
    "ddp_fused",
    "zero_redundancy",
    "fsdp2",
    "zero0",
    "zero1",
    "zero2",
    "zero3",
]
MODELS = {
    "small": {"layers": 6, "dim": 256, "batch": 4, "vocab": 1024},  # 5.3 M parameters
    "large": {"layers": 8, "dim": 768, "batch": 1, "context": 64, "vocab": 1024},  # 58 M
}


def measure(strategy: str, options: dict[str, int], steps: int, ranks: int) -> dict[str, float]:
    """One run of `steps` steps; what rank 0 measured."""
    world = 1 if strategy.startswith("plain") else ranks
    command = [sys.executable, str(HERE / "train_step.py"), strategy, "--steps", str(steps)]
    for name, value in options.items():
        command += [f"--{name}", str(value)]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "OMP_NUM_THREADS": "1"}
    processes = []
    for rank in range(world):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
        processes.append(
            subprocess.Popen(
                command, env={**os.environ, **shared, **place}, stdout=subprocess.PIPE, text=True
            )
        )
    outputs = [process.communicate(timeout=600)[0] for process in processes]
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{strategy} failed")
    return json.loads(outputs[0].splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=MODELS, default="small")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=10, help="timed steps in a round")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--strategies", nargs="+", choices=STRATEGIES, default=STRATEGIES)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    note_if_not_quiet()
    results: dict[str, list[dict[str, float]]] = {name: [] for name in arguments.strategies}
    for _ in range(arguments.rounds):
        for name, runs in results.items():
            options = MODELS[arguments.model]
            runs.append(measure(name, options, arguments.steps, arguments.ranks))
    plain = [run["seconds"] for run in results.get("plain", [])]
    print(f"{'strategy':16s} {'ms a step':>10s} {'to plain':>9s} {'spread':>13s} {'peak MB':>8s}")
    for name, runs in results.items():
        seconds = [run["seconds"] for run in runs]
        ratios = [a / b for a, b in zip(seconds, plain, strict=True)] if plain else []
        ratio = f"{statistics.median(ratios):9.3f}" if ratios else " " * 9
        spread = f"{min(ratios):6.3f}-{max(ratios):6.3f}" if ratios else " " * 13
        peak = max(run["peak_mb"] for run in runs)
        print(f"{name:16s} {statistics.median(seconds) * 1e3:10.1f} {ratio} {spread} {peak:8.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
