"""What a benchmark leaves behind: tables, the data they were made of, and where it ran.

A benchmark makes one ``Result``; its ``write`` prints the tables and puts NAME.json into the folder
of results (by default benchmarks/results/DATE). Rounds that are finished are kept beside it while
it runs, so that a benchmark that was stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import datetime
import json
import shlex
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from common import ROOT
from machine import Watch, describe, versions, words_of

RESULTS = ROOT / "benchmarks" / "results"


def parser_of(doc: str | None) -> argparse.ArgumentParser:
    """With the options that all benchmarks share."""
    lines = (doc or "").strip().splitlines()
    parser = argparse.ArgumentParser(description=lines[0] if lines else None)
    today = datetime.date.today().isoformat()
    parser.add_argument("--results", type=Path, default=RESULTS / today, help="folder to write to")
    parser.add_argument("--quick", action="store_true", help="tiny: shows that it works")
    parser.add_argument("--again", action="store_true", help="forget rounds of a stopped run")
    return parser


@dataclass
class Table:
    """Cells are text, the first column names the rows. ``name`` is what docs refer to."""

    name: str
    caption: str
    columns: list[str]
    rows: list[list[str]]

    def text(self) -> str:
        lines = [self.columns, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.columns))]
        formatted = [
            "  ".join(
                [line[0].ljust(widths[0])]
                + [c.rjust(w) for c, w in zip(line[1:], widths[1:], strict=True)]
            )
            for line in lines
        ]
        return "\n".join([self.caption, *formatted])

    def markdown(self) -> str:
        lines = [self.columns, ["---"] * len(self.columns), *self.rows]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)


class Result:
    """``timed``: False where nothing depends on who else uses the machine."""

    def __init__(self, name: str, options: argparse.Namespace, timed: bool = True) -> None:
        self.name, self.folder, self.data = name, options.results, {}
        self.tables: list[Table] = []
        self.settings = {
            key: str(value) if isinstance(value, Path) else value
            for key, value in vars(options).items()
            if key not in ("results", "again")
        }
        self.folder.mkdir(parents=True, exist_ok=True)
        self._kept = self.folder / f"{name}.rounds"
        if options.again:
            self._kept.unlink(missing_ok=True)
        self._timed = timed
        self._watch = Watch(0.2 if options.quick else 1.0)

    # ---- rounds ----

    def rounds(self, count: int, run: Callable[[int], Any]) -> list[Any]:
        """What ``run`` returned for each of ``count`` rounds (JSON); finished ones are kept."""
        found = self._read_kept()[:count]
        for index in range(len(found), count):
            found.append(run(index))
            self.lap()
            with self._kept.open("a") as file:
                file.write(json.dumps({"settings": self.settings, "round": found[-1]}) + "\n")
            print(f"{self.name}: round {index + 1} of {count}", file=sys.stderr, flush=True)
        return found

    def _read_kept(self) -> list[Any]:
        if not self._kept.is_file():
            return []
        lines = [json.loads(line) for line in self._kept.read_text().splitlines()]
        wanted = json.loads(json.dumps(self.settings))
        if any(line["settings"] != wanted for line in lines):
            self._kept.unlink()  # of another run
            return []
        return [line["round"] for line in lines]

    def lap(self) -> None:
        self._watch.lap()

    # ---- what was found ----

    def table(
        self, name: str, caption: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
    ) -> None:
        self.tables.append(Table(name, caption, list(columns), [list(row) for row in rows]))

    @property
    def plot(self) -> Path:
        return self.folder / f"{self.name}.svg"

    def write(self) -> None:
        self.lap()
        verdict = self._watch.verdict() | {"timed": self._timed}
        document = {
            "benchmark": self.name,
            "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join(["python", *sys.argv]),
            "machine": describe(),
            "versions": versions(),
            "quiet": verdict,
            "settings": self.settings,
            "tables": [asdict(table) for table in self.tables],
            "data": self.data,
        }
        path = self.folder / f"{self.name}.json"
        path.write_text(json.dumps(document, indent=1) + "\n")
        self._kept.unlink(missing_ok=True)
        for table in self.tables:
            print(f"\n{table.text()}")
        print(f"\n{words_of(verdict)} Written: {path}")


def read_result(folder: Path, name: str) -> dict[str, Any] | None:
    path = folder / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else None


# ---- cells ----


def spread(values: Sequence[float], digits: int = 2, scale: float = 1.0) -> str:
    """ "median (min-max)", or "-" of nothing."""
    if not values:
        return "-"
    low, middle, high = min(values), statistics.median(values), max(values)
    parts = [f"{value * scale:.{digits}f}" for value in (middle, low, high)]
    between = " to " if low < 0 else "-"
    return parts[0] if len(values) == 1 else f"{parts[0]} ({parts[1]}{between}{parts[2]})"
