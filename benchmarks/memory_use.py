"""What a process holds, as the kernel counts it, in MB (2^20 bytes)."""

from __future__ import annotations

import threading
from pathlib import Path

INTERVAL = 0.005  # seconds between samples


def status_mb(key: str) -> float:
    """A field of this process's status: VmRSS (now) or VmHWM (its peak)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


class PeakPss:
    """The largest proportional set size while it is entered, as a thread of its own sees it: pages
    that several processes map count for each in part. The kernel keeps no peak of it, so moments
    between two samples are missed; for comparisons of memory only, since it takes time."""

    def __init__(self, enabled: bool = True) -> None:
        self.peak = 0.0
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._sample, daemon=True) if enabled else None

    @staticmethod
    def now() -> float:
        for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) / 1024
        raise KeyError("Pss")

    def _sample(self) -> None:
        while not self._end.wait(INTERVAL):
            self.peak = max(self.peak, self.now())

    def __enter__(self) -> PeakPss:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._thread is not None:
            self._end.set()
            self._thread.join()
            self.peak = max(self.peak, self.now())
