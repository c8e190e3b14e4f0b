"""Comm hooks: what replaces the reduction of a gradient bucket."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import _C

GradientBucket = _C.GradientBucket

Finished = torch.Tensor | torch.futures.Future[torch.Tensor]
CommHook = str | Callable[[GradientBucket], Finished] | None

_ALLOWED = '"bf16", "fp16", None or a callable'
_BUILT_IN = {"bf16": _C.compress_bf16, "fp16": _C.compress_fp16}


def register(engine: _C.Engine, hook: CommHook) -> None:
    """Registers ``hook`` on all ranks. Collective; see ``ZeroOptimizer.register_comm_hook``."""
    engine.register_comm_hook(_made(hook))


def _made(hook: Any) -> _C.CommHook | None:
    if hook is None:
        return None
    if isinstance(hook, str):
        if hook not in _BUILT_IN:
            raise ValueError(
                f'expected hook to be "bf16", "fp16", None or a callable, got "{hook}"'
            )
        return _BUILT_IN[hook]()
    if not callable(hook):
        raise TypeError(f"expected hook to be {_ALLOWED}, got {hook!r}")
    return _C.python_comm_hook(_name(hook), hook)


def _name(hook: Any) -> str:
    """What ranks compare: the same for the same function or class in each process."""
    named = hook if hasattr(hook, "__qualname__") else type(hook)
    return f"{named.__module__}.{named.__qualname__}"
