"""Bytes to train on, and which of them go into which batch.

examples/text.h is the same in C++: the same files in the same order, the same batches.
"""

import os
import sysconfig
from pathlib import Path

import torch

SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
VALIDATION_SEED = 0x7A65726F
MASK = (1 << 64) - 1


def default_directory() -> Path:
    """$ZERO_TEXT_DIR, else the Python standard library."""
    return Path(os.environ.get("ZERO_TEXT_DIR") or sysconfig.get_paths()["stdlib"])


def read_directory(directory: Path, max_bytes: int) -> bytes:
    """All *.py files outside test directories, by relative path, up to `max_bytes`."""
    paths = []
    for folder, subfolders, files in os.walk(os.fsencode(directory)):
        subfolders[:] = [name for name in subfolders if os.fsdecode(name) not in SKIPPED]
        paths += [os.path.join(folder, name) for name in files if name.endswith(b".py")]
    text = bytearray()
    for path in sorted(path for path in paths if not os.path.islink(path)):
        if len(text) >= max_bytes:
            break
        text += Path(os.fsdecode(path)).read_bytes()
    return bytes(text[:max_bytes])


def hash_numbers(*numbers: int) -> int:
    """64 well-mixed bits (splitmix64's finalizer) that depend on every number."""
    state = 0
    for number in numbers:
        state = (state + number + 0x9E3779B97F4A7C15) & MASK
        state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
        state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & MASK
        state ^= state >> 31
    return state


class Batches:
    """One rank's batches of (input, target). The union over ranks and micro-batches depends only on
    seed, step and the effective batch, not on how many ranks share it."""

    def __init__(
        self,
        text: bytes,
        batch: int,
        context: int,
        seed: int,
        rank: int,
        ranks: int,
        device: torch.device | None = None,
    ):
        split = len(text) - len(text) // 20
        if len(text) - split <= context + 1:
            raise ValueError(f"a text of {len(text)} bytes is too short for a context of {context}")
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.training, self.held_out = data[:split], data[split:]
        self.batch, self.context, self.seed = batch, context, seed
        self.rank, self.ranks, self.device = rank, ranks, device

    def train(self, step: int, micro: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cut(self.training, self.seed, step, micro)

    def validation(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self._cut(self.held_out, VALIDATION_SEED, 0, number)

    def _cut(
        self, data: torch.Tensor, seed: int, step: int, number: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        first = (number * self.ranks + self.rank) * self.batch
        room = len(data) - self.context - 1
        starts = [hash_numbers(seed, step, first + i) % room for i in range(self.batch)]
        index = torch.tensor(starts).unsqueeze(1) + torch.arange(self.context + 1)
        rows = data[index].long()
        x, y = rows[:, :-1].contiguous(), rows[:, 1:].contiguous()
        return x.to(self.device), y.to(self.device)
