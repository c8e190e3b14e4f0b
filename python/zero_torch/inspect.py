"""Whole values of what is sharded, for reading and editing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import _C, _registry


@contextlib.contextmanager
def gathered(target: Any, writeback: bool = False) -> Iterator[None]:
    """Inside, the parameters of ``target`` hold whole, current values.

    ``target``: a module, a ``ZeroModule``, a parameter or an iterable of parameters, managed or
    not. With ``writeback``, rank 0's values go to all ranks at the end (also when the body raised):
    that is collective. Without it nothing is communicated at stages 0-2, where parameters are
    whole and only the last step's transfers are waited for.
    """
    managed = _managed(_parameters_of(target))
    for engine in managed:
        engine.wait_parameters()
    try:
        yield
    finally:
        if writeback:
            for engine, indices in managed.items():
                engine.broadcast_parameters(indices, 0)


def full_param(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of the whole parameter, in its own shape. Collective at stages 1 and 2.

    A tensor that nobody manages is copied too.
    """
    found = _registry.find(parameter)
    if found is None:
        return parameter.detach().clone()
    engine, index = found
    return engine.full_parameter(index)


def full_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """A copy of the whole reduced gradient, in the parameter's shape; None when there is none.

    Collective at stages 1 and 2, and wherever backward ran in ``no_sync``: it reduces that.
    """
    found = _registry.find(parameter)
    if found is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    engine, index = found
    return engine.full_gradient(index)


def full_state(parameter: torch.Tensor) -> dict[str, Any]:
    """Whole optimizer state, as in torch's ``optimizer.state[p]``; empty before a step.

    Collective at stages 1 and 2. Raises ValueError when no ZeroOptimizer steps the parameter.
    """
    found = _registry.find(parameter)
    optimizer = None if found is None else _registry.optimizer_of(found[0])
    if found is None or optimizer is None:
        raise ValueError("expected a parameter of a ZeroOptimizer, got a tensor that none steps")
    return dict(optimizer._rule.states([found[1]])).get(found[1], {})


def engines_of(module: nn.Module) -> list[_C.Engine]:
    """The engines that manage a module's parameters, in their order."""
    return list(_managed(module.parameters()))


def _parameters_of(target: Any) -> Iterable[torch.Tensor]:
    if isinstance(target, nn.Module):
        return target.parameters()
    if isinstance(target, torch.Tensor):
        return [target]
    return list(target)


def _managed(parameters: Iterable[torch.Tensor]) -> dict[_C.Engine, list[int]]:
    managed: dict[_C.Engine, list[int]] = {}
    for parameter in parameters:
        if not isinstance(parameter, torch.Tensor):
            raise TypeError(f"expected parameters, got {type(parameter).__name__}")
        if (found := _registry.find(parameter)) is not None:
            managed.setdefault(found[0], []).append(found[1])
    return managed
