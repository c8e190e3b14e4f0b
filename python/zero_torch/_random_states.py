"""States of the random number generators, which checkpoints keep: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
import sys
from typing import Any

import torch

from . import _C, _wire


def of_all(engine: _C.Engine | None) -> list[Any]:
    """By rank; also of the GPU that the engine's parameters are on. Collective."""
    own: dict[str, Any] = {
        "torch": _to_text(torch.get_rng_state()),
        "python": random.getstate(),
    }
    if engine is not None and engine.device.type == "cuda":
        own["cuda"] = _to_text(torch.cuda.get_rng_state(engine.device))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        own["numpy"] = [kind, keys.tolist(), *rest]
    return [own] if engine is None else _wire.exchange(engine, own)


def restore(states: dict[str, Any], engine: _C.Engine | None) -> None:
    """One rank's. What is of a GPU counts only where parameters are on one."""
    torch.set_rng_state(_from_text(states["torch"]))
    if "cuda" in states and engine is not None and engine.device.type == "cuda":
        torch.cuda.set_rng_state(_from_text(states["cuda"]), engine.device)
    if "python" in states:  # C++ has none
        version, internal, gauss = states["python"]
        random.setstate((version, tuple(internal), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in states:
        kind, keys, *rest = states["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), *rest))


def _to_text(state: torch.Tensor) -> str:
    return bytes(state.tolist()).hex()


def _from_text(text: str) -> torch.Tensor:
    # Whatever the default device is: generators take theirs from the CPU.
    return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8, device="cpu")
