"""Reads what callgrind wrote: the cost of each function, with and without what it called.

The format is described in valgrind's manual ("Callgrind Format Specification"); this reads one
event (instructions) of files with compressed names.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"\((\d+)\)(?: (.*))?")


@dataclass
class Profile:
    """Instructions of one part, by function. ``calls`` counts the calls of a function from
    outside itself."""

    trigger: str = ""
    total: int = 0
    own: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    inclusive: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    calls: dict[str, int] = field(default_factory=lambda: defaultdict(int))

    def top(self, count: int, kind: str = "own") -> list[tuple[str, int]]:
        costs: dict[str, int] = getattr(self, kind)
        return sorted(costs.items(), key=lambda item: -item[1])[:count]


def plain_name(name: str) -> str:
    """A function without the mark of a recursion's depth."""
    return re.sub(r"'\d+$", "", name)


class _Names:
    """Names are written once, then referred to by number."""

    def __init__(self) -> None:
        self._known: dict[str, str] = {}

    def of(self, text: str) -> str:
        found = _NAME.fullmatch(text)
        if not found:
            return text
        number, name = found.groups()
        if name is not None:
            self._known[number] = plain_name(name)
        return self._known[number]


def read(path: Path) -> Profile:
    profile, names = Profile(), _Names()
    caller = callee = ""
    is_call = False
    for line in path.read_text().splitlines():
        if line.startswith("fn="):
            caller = names.of(line[3:])
        elif line.startswith("cfn="):
            callee = names.of(line[4:])
        elif line.startswith("calls="):
            if caller != callee:
                profile.calls[callee] += int(line[6:].split()[0])
            is_call = True
        elif line.startswith("desc: Trigger: Client Request: "):
            profile.trigger = line.removeprefix("desc: Trigger: Client Request: ")
        elif line.startswith(("summary: ", "totals: ")):
            profile.total = max(profile.total, int(line.split()[1]))
        elif re.match(r"[-+*\d]", line):
            cost = int(line.split()[-1])
            if is_call:
                if caller != callee:  # the cost of a recursion is in it already
                    profile.inclusive[caller] += cost
                is_call = False
            else:
                profile.own[caller] += cost
                profile.inclusive[caller] += cost
    return profile


def read_all(pattern: Path) -> dict[str, Profile]:
    """The parts of a run, by what the program named them."""
    profiles = [read(path) for path in sorted(pattern.parent.glob(pattern.name + ".*"))]
    return {profile.trigger: profile for profile in profiles if profile.trigger}
