"""Small Python objects between the ranks of an engine."""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._C import _DistBackendError as DistBackendError

from . import _C


@contextlib.contextmanager
def collective(call: str) -> Iterator[None]:
    """Around a call that needs all ranks: where one is missing, the error says so."""
    try:
        yield
    except DistBackendError as error:
        if "is collective: call it on all ranks" in str(error):
            raise
        raise type(error)(f"{error}; {call} is collective: call it on all ranks") from error


def exchange(engine: _C.Engine, value: Any) -> list[Any]:
    """Every rank's value, in rank order. Collective."""
    own = torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
    return [pickle.loads(bytes(other.tolist())) for other in engine.exchange(own)]


def on_all(engine: _C.Engine, action: Callable[[], Any]) -> list[Any]:
    """What ``action`` gives on each rank, in rank order; or an error on every rank. Collective.

    A rank whose own action raised raises that; the others name the first such rank.
    """
    result, error = None, None
    try:
        result = action()
    except Exception as caught:
        error = caught
    told = None if error is None else f"{type(error).__name__}: {error}"
    answers = exchange(engine, (told, result))
    if error is not None:
        raise error
    for rank, (failed, _) in enumerate(answers):
        if failed is not None:
            raise RuntimeError(f"rank {rank} failed: {failed}")
    return [given for _, given in answers]


def on_rank_0(engine: _C.Engine, action: Callable[[], Any]) -> Any:
    """What ``action`` gives on rank 0, on every rank; or its error, on every rank. Collective."""
    return on_all(engine, lambda: action() if engine.rank == 0 else None)[0]
