"""Which engine manages a parameter: live engines, by weak references.

Nothing here keeps an engine, an optimizer or a model alive.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from . import _C

if TYPE_CHECKING:
    from ._watch import ModuleWatch
    from .optimizer import ZeroOptimizer

_engines: list[weakref.ref[_C.Engine]] = []
_optimizers: weakref.WeakKeyDictionary[_C.Engine, weakref.ref[ZeroOptimizer]] = (
    weakref.WeakKeyDictionary()
)
_watches: weakref.WeakKeyDictionary[_C.Engine, weakref.ref[ModuleWatch]] = (
    weakref.WeakKeyDictionary()
)


def add(engine: _C.Engine) -> None:
    _engines.append(weakref.ref(engine, _engines.remove))


def remove(engine: _C.Engine) -> None:
    """Forgets an engine that gave its parameters back, and whoever watches them for it."""
    reference = _watches.pop(engine, None)
    watch = None if reference is None else reference()
    if watch is not None:
        watch.close()
    _engines[:] = [reference for reference in _engines if reference() is not engine]


def add_watch(engine: _C.Engine, watch: ModuleWatch) -> None:
    _watches[engine] = weakref.ref(watch)


def add_optimizer(engine: _C.Engine, optimizer: ZeroOptimizer) -> None:
    _optimizers[engine] = weakref.ref(optimizer)


def optimizer_of(engine: _C.Engine) -> ZeroOptimizer | None:
    reference = _optimizers.get(engine)
    return None if reference is None else reference()


def find(parameter: torch.Tensor) -> tuple[_C.Engine, int] | None:
    """The engine of a parameter and its index there; None for a tensor that isn't managed."""
    for reference in _engines:
        engine = reference()
        if engine is not None and (index := engine.index_of(parameter)) >= 0:
            return engine, index
    return None


def refuse_managed(parameters: Iterable[tuple[str, torch.Tensor]]) -> None:
    """Raises ValueError when one of them has an engine already.

    An optimizer that the user dropped may still wait for the garbage collector (schedulers and
    optimizers refer to each other), so it gets its chance first.
    """
    if not _engines:
        return
    pairs = list(parameters)
    if _first_managed(pairs) is not None:
        gc.collect()
        name = _first_managed(pairs)
        if name is not None:
            raise ValueError(
                f"parameter '{name}' is managed already by a ZeroOptimizer or ZeroModule that is "
                "still alive; drop that first (at stage 3: zero.unwrap(model)), or pass the "
                "ZeroModule itself to ZeroOptimizer"
            )


def _first_managed(parameters: list[tuple[str, torch.Tensor]]) -> str | None:
    return next((name for name, tensor in parameters if find(tensor) is not None), None)
