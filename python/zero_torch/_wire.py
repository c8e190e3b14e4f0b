"""Small Python objects between the ranks of an engine."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import torch

from . import _C


def exchange(engine: _C.Engine, value: Any) -> list[Any]:
    """Every rank's value, in rank order. Collective."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(bytes(other.tolist())) for other in engine.exchange(own)]


def on_rank_0(engine: _C.Engine, action: Callable[[], Any]) -> Any:
    """What ``action`` gives on rank 0, on every rank; or its error, on every rank. Collective."""
    result, error = None, None
    if engine.rank == 0:
        try:
            result = action()
        except Exception as caught:
            error = caught
    told = exchange(engine, None if error is None else f"{type(error).__name__}: {error}")[0]
    if error is not None:
        raise error
    if told is not None:
        raise RuntimeError(f"rank 0 failed: {told}")
    return exchange(engine, result)[0]


def together(engine: _C.Engine, action: Callable[[], Any]) -> Any:
    """What ``action`` gives on this rank; where it fails on one, every rank raises. Collective."""
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    told = exchange(engine, None if error is None else f"{type(error).__name__}: {error}")
    if error is not None:
        raise error
    for rank, text in enumerate(told):
        if text is not None:
            raise RuntimeError(f"rank {rank} failed: {text}")
    return result
