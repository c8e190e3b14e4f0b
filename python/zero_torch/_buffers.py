"""Buffers that follow rank 0's (``sync_buffers``): which, and when."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from . import _C, _names


def attach(engine: _C.Engine, module: nn.Module) -> list[Any]:
    """Buffers follow before each training forward and in each step; the handles of hooks."""
    if not engine.options.sync_buffers:
        return []
    reference = weakref.ref(module)
    engine.set_buffers(lambda: _named_buffers(reference()))
    return [module.register_forward_pre_hook(_BeforeForward(weakref.ref(engine)))]


class _BeforeForward:
    """A hook on the root; on a copy of the module it does nothing."""

    def __init__(self, engine: weakref.ref[_C.Engine] | None = None) -> None:
        self._engine = engine

    def __reduce__(self) -> tuple[type[_BeforeForward], tuple[()]]:
        return _BeforeForward, ()

    def __call__(self, module: nn.Module, args: Any) -> None:
        engine = self._engine() if self._engine is not None else None
        training = module.training and torch.is_grad_enabled()
        if engine is not None and training and engine.requires_gradient_sync():
            engine.sync_buffers()


def _named_buffers(module: nn.Module | None) -> list[tuple[str, torch.Tensor, bool]]:
    """(name, buffer, whether it is a running statistic), as they are now; each once."""
    buffers: dict[int, tuple[str, torch.Tensor, bool]] = {}
    for prefix, part in () if module is None else _names.named_modules(module):
        statistics = isinstance(part, nn.modules.batchnorm._NormBase)
        for key, buffer in part._buffers.items():
            if buffer is not None:
                name = _names.joined(prefix, key)
                buffers.setdefault(id(buffer), (name, buffer, statistics))
    return list(buffers.values())
