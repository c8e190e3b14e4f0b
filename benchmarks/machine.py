"""The machine of a run: what it is, which versions ran, and whether others used it meanwhile."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import statistics
import subprocess
import time
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

# A share of all cores that others may take before figures are called disturbed. The load
# average says less: it still remembers the benchmark before this one.
OTHERS = 0.05
# By how much the same work may take longer at one time than at another. Other guests of a host
# slow caches, memory and cores without taking any time that this machine's kernel counts.
SLOWER = 0.2


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found[1].strip() if found else "unknown"


def describe() -> dict[str, Any]:
    cpu, memory = Path("/proc/cpuinfo").read_text(), Path("/proc/meminfo").read_text()
    flags = set(_first(r"^flags\s*: (.*)$", cpu).split())
    return {
        "processor": _first(r"^model name\s*: (.*)$", cpu),
        "cores": len(os.sched_getaffinity(0)),
        "vector": [
            name for name in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if name in flags
        ],
        "memory_gib": round(int(_first(r"^MemTotal:\s*(\d+)", memory)) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "huge_pages": _setting("/sys/kernel/mm/transparent_hugepage/enabled"),
    }


def _setting(path: str) -> str:
    try:
        return _first(r"\[(\w+)\]", Path(path).read_text())
    except OSError:
        return "unknown"


def versions() -> dict[str, str]:
    installed = {d.metadata["Name"]: d.version for d in distributions()}
    found = {"python": platform.python_version()}
    found |= {name: installed.get(name, "not installed") for name in ("torch", "numpy")}
    root = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=root, capture_output=True, text=True
    )
    found["commit"] = commit.stdout.strip() or "unknown"
    return found


def _cpu_seconds() -> tuple[float, float]:
    """(busy, stolen by the hypervisor) seconds of all cores since the machine started."""
    fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
    user, nice, system, _, _, irq, softirq, steal = (float(field) for field in fields[:8])
    tick = os.sysconf("SC_CLK_TCK")
    return (user + nice + system + irq + softirq) / tick, steal / tick


def _own_seconds() -> float:
    """Of this process and its children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Probe:
    """The same work each time, of a core and of its memory."""

    def __init__(self) -> None:
        self._from, self._to = bytearray(os.urandom(2**20) * 32), bytearray(2**25)

    def seconds(self, length: float) -> float:
        """The median time of it, for about ``length`` seconds."""
        times, end = [self._once()], time.perf_counter() + length
        while time.perf_counter() < end:
            times.append(self._once())
        return statistics.median(times)

    def _once(self) -> float:
        begin = time.perf_counter()
        hashlib.sha512(memoryview(self._from)[: 2**21]).digest()
        self._to[:] = self._from
        return time.perf_counter() - begin


class Watch:
    """Tells what others took of the machine: before the first lap, and in each lap; and how long
    the same work took at these times.

    A lap ends when all processes that it started have ended, or their time counts as others'.
    """

    def __init__(self, pause: float = 1.0) -> None:
        self.laps: list[dict[str, float]] = []
        self._probe, self._length = Probe(), pause
        self._begin()
        time.sleep(pause)
        self.before = self._lap()

    def _begin(self) -> None:
        self._clock, self._own = time.perf_counter(), _own_seconds()
        self._busy, self._stolen = _cpu_seconds()

    def _lap(self) -> dict[str, float]:
        capacity = (time.perf_counter() - self._clock) * (os.cpu_count() or 1)
        busy, stolen = _cpu_seconds()
        others = busy - self._busy - (_own_seconds() - self._own)
        lap = {
            "load": round(os.getloadavg()[0], 2),
            "others": round(max(0.0, others) / capacity, 4),
            "stolen": round((stolen - self._stolen) / capacity, 4),
            "probe": round(self._probe.seconds(self._length), 6),
        }
        self._begin()
        return lap

    def lap(self) -> None:
        self.laps.append(self._lap())

    def verdict(self) -> dict[str, Any]:
        worst = max((lap["others"] + lap["stolen"] for lap in self.laps), default=0.0)
        busy_before = self.before["others"] + self.before["stolen"]
        probes = [lap["probe"] for lap in (self.before, *self.laps)]
        slower = max(probes) / min(probes) - 1
        return {
            "quiet": worst <= OTHERS and busy_before <= OTHERS and slower <= SLOWER,
            "worst": worst,
            "slower": round(slower, 4),
            "before": self.before,
            "during": self.laps,
        }


def words_of(verdict: dict[str, Any]) -> str:
    if not verdict.get("timed", True):
        return "Nothing in it is timed."
    slower = f"the same work took up to {verdict['slower']:.0%} longer at one time than at another"
    if verdict["quiet"]:
        return f"The machine was quiet: {slower}."
    before = verdict["before"]["others"] + verdict["before"]["stolen"]
    return (
        f"The machine was NOT quiet: others took {before:.0%} of it before, "
        f"and up to {verdict['worst']:.0%} meanwhile; {slower}."
    )
