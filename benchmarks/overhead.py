"""Host time that sharding adds to a step of many tiny layers, by unit and step.

    python benchmarks/overhead.py [--units 64 16 256 1024] [--parameters 2 1 8] [--rounds 3]
    python benchmarks/overhead.py --fake-ranks 8        # collectives that do nothing

One rank, so nothing travels; each cell of the model is a unit of FSDP2 and of Zero's stage 3, which
gather it twice. The first of --units is measured with all of --parameters (parameters of a unit),
the others with the first of those. "over plain" is what a unit costs a step over one plain process
with the same AdamW (torch's default for NAME, fused for NAME_fused and Zero) in the same round.
With --fake-ranks torch's "fake" group plays that many ranks: what a strategy does for several ranks
is in it, their bytes are not, and results are meaningless numbers. A strategy that such a group
does not carry has no figure ("-"). Then what the on-use guard costs a GPT that isn't sharded, with
it on and off in turn.

Each variant runs in a process of its own, since the guard sees every operation of its process.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import plots
import torch
import torch.distributed as dist
from common import free_port, rank_environment
from models import TASKS, Cell, Cells
from results import Result, parser_of, spread
from strategies import ZERO, stage_of, wrap

VARIANTS = ["plain", "plain_fused", "ddp", "ddp_fused", "fsdp2", "fsdp2_fused", *ZERO]
WIDTH, SAMPLES = 32, 8
WARMUP, SECONDS = 5, 2.0  # a variant runs for so long, or for --steps

Times = dict[str, float]  # seconds of a step, by variant


# ---- one variant, in a process of its own ----


def stepper(options: argparse.Namespace) -> Callable[[], None]:
    torch.manual_seed(0)
    cells = Cells(options.units[0], WIDTH, options.parameters[0])
    zero = stage_of(options.variant) is not None
    more = {"units": [Cell], "min_unit_numel": 0} if zero else {}
    trainer = wrap(options.variant, cells, Cell, **more)
    x = torch.randn(SAMPLES, WIDTH)

    def step() -> None:
        trainer.backward(trainer.model(x).sum())
        trainer.step()

    return step


def median_of(step: Callable[[], object], steps: int) -> float:
    for _ in range(WARMUP):
        step()
    seconds: list[float] = []
    ended = time.perf_counter() + SECONDS
    while len(seconds) < 5 or (len(seconds) < steps and time.perf_counter() < ended):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds)


def run_variant(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    if options.fake_ranks > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=options.fake_ranks)
    elif not options.variant.startswith("plain"):
        dist.init_process_group("gloo")
    print(json.dumps(median_of(stepper(options), options.steps)), flush=True)


# ---- all of them ----


def measure(variant: str, units: int, parameters: int, options: argparse.Namespace) -> float | None:
    """Seconds of a step, or None where the variant does not run with a fake group."""
    command = [sys.executable, __file__, "--variant", variant, "--steps", str(options.steps)]
    command += ["--units", str(units), "--parameters", str(parameters)]
    command += ["--fake-ranks", str(options.fake_ranks)]
    environment = rank_environment(0, 1, free_port())
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=600)
    if run.returncode == 0:
        return float(run.stdout.splitlines()[-1])
    if options.fake_ranks > 1:
        return None
    raise RuntimeError(f"{variant} failed")


def base_of(variant: str) -> str:
    fused = variant.endswith("_fused") or stage_of(variant) is not None
    return "plain_fused" if fused else "plain"


def over_plain(rounds: list[dict[str, Any]], key: str, variant: str, units: int) -> list[float]:
    """Microseconds a unit and step, by round."""
    pairs = [(found[key][variant], found[key][base_of(variant)]) for found in rounds]
    return [(a - b) / units * 1e6 for a, b in pairs if a is not None]


def key_of(units: int, parameters: int) -> str:
    return f"{units} x {parameters}"


def by_units(options: argparse.Namespace) -> list[tuple[int, int]]:
    """(units, parameters of a unit), as a row of the first table has them."""
    return [(units, options.parameters[0]) for units in sorted(options.units)]


def by_parameters(options: argparse.Namespace) -> list[tuple[int, int]]:
    return [(options.units[0], parameters) for parameters in sorted(options.parameters)]


def add_tables(result: Result, rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    where = f"a fake group of {options.fake_ranks}" if options.fake_ranks > 1 else "one rank"
    for name, cells in (("units", by_units(options)), ("parameters", by_parameters(options))):
        rows = [
            [
                variant,
                *(spread(over_plain(rounds, key_of(*cell), variant, cell[0]), 1) for cell in cells),
            ]
            for variant in VARIANTS[2:]
        ]
        result.table(
            f"{result.name}-{name}",
            f"Host overhead, {where}: us per unit and step over plain torch with the same AdamW "
            f"(median and range of {len(rounds)} rounds)",
            ["", *(f"{units} units of {parameters}" for units, parameters in cells)],
            rows,
        )


def guard_round(steps: int) -> dict[str, float]:
    """Medians of forward and backward of a GPT, without and with the on-use guard, in turn."""
    import zero_torch as zero

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, generator = TASKS["small"].make(), torch.Generator()

    def seconds() -> float:
        times = []
        for _ in range(2):  # the heap and the caches are the same for both
            began = time.perf_counter()
            TASKS["small"].loss(model, generator).backward()
            times.append(time.perf_counter() - began)
        return times[1]

    off, on = [], []
    for _ in range(steps):
        off.append(seconds())
        sharded = zero.ZeroModule(torch.nn.Linear(1, 1), stage=3)  # the guard is on while it lives
        on.append(seconds())
        del sharded
    ratio = statistics.median(b / a for a, b in zip(off, on, strict=True))
    return {"off": statistics.median(off), "on": statistics.median(on), "ratio": ratio}


def draw(result: Result, rounds: list[dict[str, Any]], options: argparse.Namespace) -> None:
    panel = {}
    for variant in VARIANTS[2:]:
        points = []
        for units, parameters in by_units(options):
            extra = over_plain(rounds, key_of(units, parameters), variant, units)
            if extra:
                points.append((units, max(0.1, statistics.median(extra))))
        panel[variant] = points
    panels = {f"{options.parameters[0]} parameters a unit": panel}
    plots.lines(result.plot, panels, "units", "us per unit and step over plain torch")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--units", type=int, nargs="+", default=[64, 16, 256, 1024])
    parser.add_argument("--parameters", type=int, nargs="+", default=[2, 1, 8], help="in a unit")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=100, help="at most")
    parser.add_argument("--fake-ranks", type=int, default=1)
    parser.add_argument("--variant", choices=VARIANTS, help="only this one, in this process")
    options = parser.parse_args()
    if options.variant:
        run_variant(options)
        return
    if options.quick:
        options.units, options.parameters, options.rounds, options.steps = [16], [2], 1, 5
    fake = options.fake_ranks > 1
    result = Result("overhead-fake" if fake else "overhead", options)

    def run(_: int) -> dict[str, Any]:
        return {
            key_of(*cell): {variant: measure(variant, *cell, options) for variant in VARIANTS}
            for cell in dict.fromkeys(by_units(options) + by_parameters(options))
        }

    rounds = result.rounds(options.rounds, run)
    add_tables(result, rounds, options)
    result.data = {"rounds": rounds}
    if not fake:
        guard = guard_round(1 if options.quick else 40)
        result.data["guard"] = guard
        cells = [f"{guard[key] * 1e3:.1f} ms" for key in ("off", "on")] + [f"{guard['ratio']:.4f}"]
        result.table(
            "guard",
            "The on-use guard on a GPT of 5.3 M parameters that is not sharded: forward, backward",
            ["", "without", "with it", "ratio"],
            [["guard", *cells]],
        )
    draw(result, rounds, options)
    result.write()


if __name__ == "__main__":
    main()
