"""Whole values of what is sharded, for reading and editing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from . import _C, _hooks, _registry, _wire


@contextlib.contextmanager
def gathered(target: Any, writeback: bool = False) -> Iterator[None]:
    """Inside, the parameters of ``target`` hold whole, current values.

    ``target``: a module, a ``ZeroModule``, a parameter or an iterable of parameters, managed or
    not. At stage 3 all units of these parameters are whole until the end: that is collective, and
    so is the end with ``writeback``, which gives rank 0's values to all ranks (also when the body
    raised). Without ``writeback`` writing to them raises at stage 3, and nothing is communicated
    at stages 0-2. May be nested; not around ``step``.
    """
    managed = _managed(_parameters_of(target))
    with contextlib.ExitStack() as held:
        for engine, indices in managed.items():
            engine.hold(indices, writeback)
            held.callback(engine.let_go, indices, writeback)
        yield


@_wire.collective("full_param")
def full_param(parameter: torch.Tensor) -> torch.Tensor:
    """A copy of the whole parameter, in its own shape. Collective at stages 1 to 3.

    A tensor that nobody manages is copied too.
    """
    found = _registry.find(parameter)
    if found is None:
        return parameter.detach().clone()
    engine, index = found
    return engine.full_parameter(index)


@_wire.collective("full_grad")
def full_grad(parameter: torch.Tensor) -> torch.Tensor | None:
    """A copy of the whole reduced gradient, in the parameter's shape; None when there is none.

    Collective at stages 1 to 3, and wherever backward ran in ``no_sync``: it reduces that.
    """
    found = _registry.find(parameter)
    if found is None:
        return None if parameter.grad is None else parameter.grad.detach().clone()
    engine, index = found
    return engine.full_gradient(index)


@_wire.collective("full_state")
def full_state(parameter: torch.Tensor) -> dict[str, Any]:
    """Whole optimizer state, as in torch's ``optimizer.state[p]``; empty before a step.

    Collective at stages 1 to 3. Raises ValueError when no ZeroOptimizer steps the parameter.
    """
    found = _registry.find(parameter)
    optimizer = None if found is None else _registry.optimizer_of(found[0])
    if found is None or optimizer is None:
        raise ValueError("expected a parameter of a ZeroOptimizer, got a tensor that none steps")
    return dict(optimizer._rule.states([found[1]])).get(found[1], {})


def unwrap(module: nn.Module) -> nn.Module:
    """The plain module, with whole parameters of its own and without any of our hooks. Collective.

    ``module``: a ``ZeroModule``, or a module that a ``ZeroOptimizer`` shards, whose optimizer is of
    no use afterwards. At stage 3 every rank ends with the whole model.
    """
    for engine in engines_of(module):
        release(engine)
    inner = module.__dict__.get("module")  # of a ZeroModule
    return inner if isinstance(inner, nn.Module) else module


def release(engine: _C.Engine) -> None:
    """Gives an engine's parameters back. Collective."""
    engine.release_parameters()
    _hooks.detach(engine)
    _registry.remove(engine)


def engines_of(module: nn.Module) -> list[_C.Engine]:
    """The engines that manage a module's parameters, in their order."""
    return list(_managed(module.parameters()))


def engine_of(target: Any) -> _C.Engine:
    """The one engine of a module's parameters; TypeError or ValueError when there is none."""
    if not isinstance(target, nn.Module):
        raise TypeError(
            f"expected a ZeroOptimizer or a sharded module, got {type(target).__name__}"
        )
    engines = engines_of(target)
    if len(engines) != 1:
        raise ValueError(
            "expected a module whose parameters one ZeroOptimizer or ZeroModule manages, got "
            f"{len(engines)} of them in this {type(target).__name__}"
        )
    return engines[0]


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
