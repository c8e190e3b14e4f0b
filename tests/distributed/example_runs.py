"""Starts examples/train_gpt, in Python or C++, and ends it at chosen moments."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0


def command(language: str, ranks: int) -> list[str]:
    """With torchrun, or for no ranks alone."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(ranks)]
    if language == "python":
        program = [str(ROOT / "examples" / "train_gpt.py")]
        return [*(launcher if ranks else [sys.executable]), *program]
    program = [str(ROOT / "build" / version("torch") / "train_gpt")]
    return [*launcher, "--no-python", *program] if ranks else program


def write_text(folder: Path) -> None:
    """Files to train on, and some that are passed over."""
    for path in ("b.py", "a/z.py", "a.py", "a/test/skipped.py", "a/skipped.txt"):
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"# {path}\n" + f"def function_{len(path)}(x): return x\n" * 60)


class Launch:
    """A run under torchrun; its output goes to a file beside ``out``."""

    def __init__(self, language: str, ranks: int, flags: str, out: Path) -> None:
        self.out = out
        self.log = out.with_suffix(".log")
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [*command(language, ranks), *flags.split(), "--out", str(out)],
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ranks(self) -> list[int]:
        launcher = self.process.pid
        children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text()
        return [int(pid) for pid in children.split()]

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Looks often: what is waited for may pass in milliseconds."""
        deadline = time.monotonic() + LIMIT_S
        while not condition():
            assert self.process.poll() is None, "ended too early:\n" + self.log.read_text()
            assert time.monotonic() < deadline, "nothing happened:\n" + self.log.read_text()
            time.sleep(0.0002)

    def kill_rank(self, at: int) -> None:
        """The launcher ends the others."""
        ranks = self.ranks()
        os.kill(ranks[at % len(ranks)], signal.SIGKILL)
        assert self.process.wait(LIMIT_S) != 0

    def kill_all(self) -> None:
        """The launcher too, at once."""
        pids = [*self.ranks(), self.process.pid]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)
        for pid in pids[:-1]:
            while Path(f"/proc/{pid}").exists():  # init may take a moment to bury it
                if " Z " in Path(f"/proc/{pid}/stat").read_text():
                    break
                time.sleep(0.01)

    def end(self) -> str:
        """Waits for a run that ends by itself; what it printed."""
        code = self.process.wait(LIMIT_S)
        text = self.log.read_text()
        assert code == 0, text
        return text

    def stop(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(LIMIT_S)


# ---- what runs leave on the disk ----


def steps_in(out: Path) -> int:
    """Losses in the history so far."""
    try:
        return (out / "history.jsonl").read_text().count("training")
    except OSError:
        return 0


def unfinished_saves(out: Path) -> set[str]:
    """Checkpoints whose files are there and whose manifest is not."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir(out / "checkpoints"):
            files = os.listdir(out / "checkpoints" / name)
            if files and "manifest.json" not in files:
                found.add(name)
    return found


def tensors_of(checkpoint: Path) -> dict[str, bytes]:
    """Parameters and state, whole, read without the library."""
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    files = []
    for entry in manifest["files"]:
        data = (checkpoint / entry["name"]).read_bytes()
        size = int.from_bytes(data[:8], "little")
        files.append((json.loads(data[8 : 8 + size]), data[8 + size :]))
    whole = {}
    for tensor in manifest["tensors"]:
        parts = []
        for file, begin, count, _ in sorted(tensor["pieces"], key=lambda piece: piece[1]):
            header, data = files[file]
            first, last = header[f"{tensor['name']}[{begin}:{begin + count}]"]["data_offsets"]
            parts.append(data[first:last])
        whole[tensor["name"]] = b"".join(parts)
    return whole
