"""Instructions of one training step, counted by callgrind: 64 tiny layers on one rank.

    python benchmarks/instructions.py [--check | --update] [--profile zero3] [--quick]

Counts repeat where times do not: they tell in a minute whether a change made steps dearer. The
table shows instructions and allocations per layer and step, beside the same program with torch's
fused AdamW and nothing else; at stage 3 each layer is a unit, gathered twice. With --check they are
compared with expected_instructions.json (within its tolerance, by torch's minor version; a count
that is lower is no failure), with --update they are written there. --profile prints the functions
that cost most. Vector instructions up to AVX2, which is what valgrind knows.

`make build` builds step_instructions where valgrind's headers are (apt-get install valgrind).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import callgrind
from callgrind import Profile
from common import HERE, add_program, check_program
from results import Result, parser_of

EXPECTED = HERE / "expected_instructions.json"
VARIANTS = ["plain", "plain_fused", "zero0", "zero1", "zero2", "zero3"]
PHASES = ["run_forward", "run_backward", "run_step", "run_zero_grad"]
ALLOCATIONS = ("malloc", "calloc", "realloc", "posix_memalign", "aligned_alloc")
WARM, STEPS, LAYERS = 5, 10, 64


def measure(program: Path, variants: list[str], limit: float = 600) -> dict[str, Profile]:
    """The profile of each variant; RuntimeError with valgrind's words when it failed."""
    if shutil.which("valgrind") is None:
        raise RuntimeError("valgrind is missing: apt-get install valgrind")
    # One choice of kernels on every machine; nothing that starts threads.
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default"}
    with tempfile.TemporaryDirectory(prefix="callgrind-") as folder:
        out = Path(folder) / "out"
        command = ["valgrind", "--tool=callgrind", "--instr-atstart=no"]
        command += [f"--callgrind-out-file={out}", str(program)]
        command += [str(number) for number in (LAYERS, WARM, STEPS)] + variants
        run = subprocess.run(
            command, env={**os.environ, **fixed}, capture_output=True, text=True, timeout=limit
        )
        if run.returncode:
            raise RuntimeError(f"step_instructions failed under valgrind:\n{run.stderr}")
        return callgrind.read_all(out)


def per_layer(count: float) -> float:
    return count / (LAYERS * STEPS)


def phase_cost(profile: Profile, phase: str) -> int:
    """Of one of the program's own functions, with all that it calls."""
    name = f"(anonymous namespace)::{phase}("
    return sum(cost for function, cost in profile.inclusive.items() if function.startswith(name))


def counts_of(profiles: dict[str, Profile]) -> dict[str, dict[str, float]]:
    """By variant, per layer and step."""
    return {
        variant: {
            "instructions": round(per_layer(profile.total), 1),
            "allocations": round(
                per_layer(sum(profile.calls.get(name, 0) for name in ALLOCATIONS)), 1
            ),
            **{phase: round(per_layer(phase_cost(profile, phase)), 1) for phase in PHASES},
        }
        for variant, profile in profiles.items()
    }


# ---- expected counts ----


def torch_minor() -> str:
    return ".".join(version("torch").split(".")[:2])


def check(counts: dict[str, dict[str, float]], expected_file: Path = EXPECTED) -> list[str]:
    """What costs more than expected, in words."""
    document = json.loads(expected_file.read_text())
    tolerance, minor = document["tolerance"], torch_minor()
    if minor not in document["counts"]:
        return [f"no counts for torch {minor} in {expected_file.name}: run with --update"]
    dearer = []
    for variant, expected in document["counts"][minor].items():
        for what, limit in expected.items():
            found = counts[variant][what]
            if found > limit * (1 + tolerance):
                dearer.append(
                    f"{variant}: {found:.1f} {what} per layer and step, expected at most "
                    f"{limit:.1f} + {tolerance:.0%} (torch {minor}); see which functions with "
                    f"benchmarks/instructions.py --profile {variant}"
                )
    return dearer


def update(counts: dict[str, dict[str, float]], expected_file: Path = EXPECTED) -> None:
    document = json.loads(expected_file.read_text())
    document["counts"][torch_minor()] = {
        variant: {what: found[what] for what in ("instructions", "allocations")}
        for variant, found in counts.items()
        if variant.startswith("zero")
    }
    document["counts"] = dict(sorted(document["counts"].items()))
    expected_file.write_text(json.dumps(document, indent=1) + "\n")


# ---- what is shown ----


def profile_text(profile: Profile, base: Profile, count: int = 40) -> str:
    """The functions that cost most, and those that cost most over the base's."""
    lines = []
    for kind, title in (("own", "by themselves"), ("inclusive", "with what they call")):
        lines.append(
            f"{profile.trigger}: instructions per layer and step (over {base.trigger}), functions "
            f"{title}"
        )
        other: dict[str, int] = getattr(base, kind)
        own: dict[str, int] = getattr(profile, kind)
        costs = sorted(own.items(), key=lambda item: other.get(item[0], 0) - item[1])
        for name, cost in costs[:count]:
            over = per_layer(cost - other.get(name, 0))
            lines.append(f"{per_layer(cost):10.1f} {over:+10.1f}  {name[:140]}")
    return "\n".join(lines)


def add_table(result: Result, counts: dict[str, dict[str, float]]) -> None:
    base = counts.get("plain_fused")
    rows = []
    for variant, found in counts.items():
        over = f"{found['instructions'] - base['instructions']:+.0f}" if base else "-"
        phases = [f"{found[phase]:.0f}" for phase in PHASES]
        rows.append(
            [variant, f"{found['instructions']:.0f}", over, *phases, f"{found['allocations']:.1f}"]
        )
    result.table(
        "instructions",
        f"Instructions per layer and step, {LAYERS} layers of 32 x 32 on one rank, from C++ "
        f"(callgrind, {STEPS} steps after {WARM})",
        [
            "",
            "instructions",
            "over fused",
            "forward",
            "backward",
            "step",
            "zero_grad",
            "allocations",
        ],
        rows,
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=VARIANTS)
    parser.add_argument("--profile", nargs="+", choices=VARIANTS, default=[])
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--check", action="store_true", help="against the expected counts")
    action.add_argument("--update", action="store_true", help="the expected counts")
    add_program(parser, "step_instructions")
    options: argparse.Namespace = parser.parse_args()
    check_program(options.program)
    variants = ["plain_fused", "zero0", "zero3"] if options.quick else options.variants
    if options.update or options.check:
        variants = VARIANTS
    variants = [*dict.fromkeys(["plain_fused", *variants, *options.profile])]
    try:
        profiles = measure(options.program, variants, options.limit)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        sys.exit(str(error))
    counts = counts_of(profiles)
    if options.update:
        update(counts)
    if options.check:
        dearer = check(counts)
        print("\n".join(dearer) or "no step costs more than expected")
        sys.exit(1 if dearer else 0)
    for variant in set(options.profile) & set(profiles):
        print(profile_text(profiles[variant], profiles["plain_fused"]))
    result = Result("instructions", options, timed=False)
    add_table(result, counts)
    result.data = {"counts": counts, "layers": LAYERS, "steps": STEPS}
    result.write()


if __name__ == "__main__":
    main()
