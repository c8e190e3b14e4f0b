"""Casts of what goes into a model in mixed precision, and of what comes out."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from .config import ZeroConfig


def attach(module: nn.Module, config: ZeroConfig) -> list[Any]:
    """Forward hooks on the root for ``cast_forward_inputs`` and ``output_dtype``; their handles."""
    handles: list[Any] = []
    if config.cast_forward_inputs and config.param_dtype is not None:
        cast = _Cast(config.param_dtype)
        handles.append(module.register_forward_pre_hook(cast.inputs, with_kwargs=True))
    if config.output_dtype is not None:
        handles.append(module.register_forward_hook(_Cast(config.output_dtype).output))
    return handles


class _Cast:
    """To one dtype, in nested lists, tuples and dicts; integers, and the rest, stay."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def inputs(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return self._all(args), self._all(kwargs)

    def output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return self._all(output)

    def _all(self, values: Any) -> Any:
        return tree_map_only(torch.Tensor, self._one, values)

    def _one(self, value: torch.Tensor) -> torch.Tensor:
        return value.to(self._dtype) if value.is_floating_point() else value
