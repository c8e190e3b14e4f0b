"""Where a run stands: its checkpoints, the losses of its steps, and what makes it the run it is.

examples/resume.h is the same in C++, with the same files, so that each goes on where the other
stopped:

    <out>/checkpoints/step-N   model and optimizer after N steps; Standing's fields in its extra
    <out>/history.jsonl        a line for each loss, in order; cut at the step that a run resumes at
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import math
import os
import shutil
import time
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import zero_torch as zero

# What a checkpoint must agree on with the flags. The effective batch is batch x ranks x accumulate.
COMPARED = [
    *("layers", "dim", "heads", "context"),
    *("text_crc32", "seed", "batch", "accumulate", "sync_every_micro"),
    *("lr", "min_lr", "warmup", "decay_steps", "clip"),
]


@dataclass
class Standing:
    """What is known of a run besides the model and the optimizer."""

    step: int = 0  # steps taken
    seconds: float = 0.0  # of training, without validation and checkpoints
    tokens: int = 0
    configuration: dict[str, Any] = field(default_factory=dict)
    memory: list[dict[str, Any]] = field(default_factory=list)  # by rank; from the last step on
    theory: dict[str, int] = field(default_factory=dict)

    def save(self, args: argparse.Namespace, model: Any, opt: zero.ZeroOptimizer) -> None:
        """Collective."""
        path = args.out / "checkpoints" / f"step-{self.step}"
        zero.save(path, model, opt, extra=asdict(self), keep_last=args.keep_last)


def latest_of(args: argparse.Namespace) -> Path | None:
    folder = args.out / "checkpoints"
    if args.fresh or not folder.is_dir():
        return None
    found = zero.latest(folder)
    return None if found is None else Path(found)


def standing_of(checkpoint: Path) -> Standing:
    """Read from the manifest, before there is a model."""
    extra = json.loads((checkpoint / "manifest.json").read_text())["extra"]
    if not isinstance(extra, dict) or extra.keys() != asdict(Standing()).keys():
        raise ValueError(f"{checkpoint} is no checkpoint of this example; choose another --out")
    return Standing(**extra)


def describe(args: argparse.Namespace, text: bytes, ranks: int) -> dict[str, Any]:
    """What the numbers of a run depend on, and how it is spread."""
    found = {name: getattr(args, name) for name in COMPARED if hasattr(args, name)}
    found |= {"text_bytes": len(text), "text_crc32": zlib.crc32(text)}
    found["text"] = str(args.text or args.text_dir)
    return found | {"ranks": ranks, "stage": args.stage}


def effective_batch(configuration: dict[str, Any]) -> int:
    return configuration["batch"] * configuration["ranks"] * configuration["accumulate"]


def differences(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What makes it another run. How the same effective batch is spread does not."""
    spread = set()
    if effective_batch(saved) == effective_batch(now):
        spread = {"batch", "accumulate", "sync_every_micro"}
    return [
        f"{_flag(name)} was {_shown(saved, name)}, is {_shown(now, name)}"
        for name in COMPARED
        if name not in spread and saved.get(name) != now[name]
    ]


def refusal(checkpoint: Path, different: list[str]) -> str:
    return (
        f"{checkpoint} is of another run: {'; '.join(different)}.\n"
        "Start with the same settings to go on with it, with another --out to keep both, or with "
        "--fresh to delete it and start over."
    )


def changes(saved: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """What is different and allowed, to be said."""
    lines = []
    if saved["stage"] != now["stage"]:
        lines.append(f"stage {now['stage']} instead of {saved['stage']}: the numbers stay the same")
    before, after = effective_batch(saved), effective_batch(now)
    if saved["ranks"] != now["ranks"]:
        size = f"stays {before} sequences"
        if before != after:
            size = f"is {after} sequences instead of {before}"
        lines.append(f"ranks {now['ranks']} instead of {saved['ranks']}: a step {size}")
    elif any(saved[name] != now[name] for name in ("batch", "accumulate")):
        lines.append(f"another micro-batch: a step stays {before} sequences")
    return lines


def _flag(name: str) -> str:
    return "the text" if name == "text_crc32" else "--" + name.replace("_", "-")


def _shown(configuration: dict[str, Any], name: str) -> str:
    if name == "text_crc32":
        size, source = (configuration.get(key) for key in ("text_bytes", "text"))
        return f"{size} bytes of {source} (CRC-32 {configuration.get(name)})"
    return json.dumps(configuration.get(name))


class History:
    """The losses of a run; rank 0 keeps them in memory and in the file, others nothing.

    The file is locked: one run at a time writes to an --out. Made before anything there is read.
    """

    def __init__(self, args: argparse.Namespace, rank: int) -> None:
        self.losses: list[float] = []
        self.validation: list[tuple[int, float]] = []
        self.path = args.out / "history.jsonl"
        self._file = None
        if rank == 0:
            args.out.mkdir(parents=True, exist_ok=True)
            self._file = self.path.open("ab+", buffering=0)
            self._lock()

    def begin(self, args: argparse.Namespace, step: int) -> None:
        """What was before `step` stays."""
        if self._file is None:
            return
        self._keep(step)
        if step == 0:  # of a run before this one
            (args.out / "metrics.json").unlink(missing_ok=True)
        if args.fresh:
            shutil.rmtree(args.out / "checkpoints", ignore_errors=True)

    def _lock(self) -> None:
        for _ in range(100):  # a process that was killed may need a moment to end
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.1)
        raise RuntimeError(
            f"another run writes to {self.path.parent}; end it, or choose another --out"
        )

    def _keep(self, step: int) -> None:
        """Reads what was before `step`, and cuts the rest off: it will be done again."""
        self._file.seek(0)
        kept = 0
        for line in self._file.read().splitlines(keepends=True):
            if len(self.losses) == step or not line.endswith(b"\n"):
                break
            entry = json.loads(line)
            value = math.nan if entry["loss"] is None else entry["loss"]
            if entry["kind"] == "validation":
                self.validation.append((entry["step"], value))
            else:
                self.losses.append(value)
            kept += len(line)
        if len(self.losses) != step:
            raise RuntimeError(
                f"expected the losses of {step} steps in {self.path}, got {len(self.losses)}; put "
                "the file back, or start over with --fresh"
            )
        self._file.truncate(kept)

    def add_loss(self, step: int, loss: float) -> None:
        if self._file is not None:
            self.losses.append(loss)
            self._write("training", step, loss)

    def add_validation(self, step: int, loss: float) -> None:
        if self._file is not None:
            self.validation.append((step, loss))
            self._write("validation", step, loss)

    def _write(self, kind: str, step: int, loss: float) -> None:
        finite = loss if math.isfinite(loss) else None
        self._file.write(json.dumps({"step": step, "kind": kind, "loss": finite}).encode() + b"\n")

    def flush(self) -> None:
        """To the disk: before the checkpoint that relies on it."""
        if self._file is not None:
            os.fsync(self._file.fileno())


def is_finished(args: argparse.Namespace, step: int) -> bool:
    """Whether all steps were taken, and everything was written that comes after the last."""
    if step != args.steps:
        return step > args.steps
    metrics, picture = args.out / "metrics.json", args.out / "training.png"
    try:
        if len(json.loads(metrics.read_text())["losses"]) != step:
            return False
        return args.no_plot or picture.stat().st_mtime_ns >= metrics.stat().st_mtime_ns
    except (OSError, ValueError, KeyError):
        return False


def after_the_end(args: argparse.Namespace, step: int) -> str:
    return (
        f"{step} steps were taken, --steps is {args.steps}. To go on, give more: --steps "
        f"{2 * step} (make train ARGS='--steps {2 * step}'); --fresh starts over."
    )
