"""State dicts of what each rank holds: ``full=False``. Saved without communication.

They are marked with the rank, the number of ranks and the stage that they are of, as an attribute,
which ``torch.save`` keeps; shapes are compared too.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, SupportsIndex, SupportsInt

import torch
from torch import nn

from . import _C, _hooks, _names, _registry, _wire, packing
from .inspect import engines_of
from .optimizer import ZeroOptimizer

_MARK = "_zero_shards"
_REMEDY = (
    "a sharded state dict (full=False) loads only on the rank that it is of, at the same number of "
    "ranks, stage and layout; for everything else use zero.save and zero.load, or full=True"
)


def model_state_dict(model: nn.Module) -> dict[str, Any]:
    engines = engines_of(model)
    with _hooks.giving_shards({engine: _C.held_values(engine) for engine in engines}):
        state = model.state_dict()
    return _marked(_names.to_plain(model, state), engines)


def optimizer_state_dict(optimizer: ZeroOptimizer) -> dict[str, Any]:
    packed = packing.pack(optimizer, optimizer._rule.held_states(), keep=True)
    return _marked(packed, [optimizer._live])


def load_model(model: nn.Module, state_dict: Any, strict: bool) -> None:
    """Each rank its own. Collective."""
    engines = engines_of(model)
    if not engines:
        _names.load_into(model, state_dict, strict)
        return
    places = {
        name: found
        for name, parameter in _names.named_parameters(model, remove_duplicate=False)
        if (found := _registry.find(parameter)) is not None
    }
    held = {engine: _C.held_values(engine) for engine in engines}
    shapes = {
        name: held[engine][index].shape
        for name, (engine, index) in places.items()
        if index in held[engine]
    }
    given: dict[str, Any] = {}

    def check() -> None:
        given.update(_checked(model, state_dict, shapes, strict, engines))

    _wire.on_all(engines[0], check)
    rest = OrderedDict((name, value) for name, value in given.items() if name not in shapes)
    if hasattr(state_dict, "_metadata"):
        rest._metadata = state_dict._metadata  # type: ignore[attr-defined]
    _wire.on_all(engines[0], lambda: _names.load_into(model, rest, strict=False))
    for engine, values in held.items():
        if values:
            own: dict[SupportsInt | SupportsIndex, torch.Tensor] = {
                places[name][1]: given[name]
                for name in shapes
                if places[name][0] is engine and name in given
            }
            _C.load_held_values(engine, own)


def load_optimizer(optimizer: ZeroOptimizer, state_dict: Any) -> None:
    """Each rank its own. Collective."""
    engine = optimizer._live
    read: list[packing.Unpacked] = []

    def unpack() -> list[int]:
        if not isinstance(state_dict, dict):
            raise TypeError(f"expected state_dict to be a dict, got {type(state_dict).__name__}")
        _check_mark(state_dict, [engine])
        read.append(packing.unpack(optimizer, state_dict))
        return sorted(read[0].states)

    indices = sorted({index for of_rank in _wire.on_all(engine, unpack) for index in of_rank})
    engine.make_trainable(indices)  # which have a part on this rank from here on
    shapes = {
        index: tuple(engine.parameter(index)[1].shape)
        if engine.options.stage == 0
        else (engine.shard_parameter(index).numel(),)
        for index in read[0].states
    }

    def check() -> None:
        try:
            packing.check(optimizer, read[0], shapes)
        except ValueError as error:
            raise ValueError(f"{error}; {_REMEDY}") from None

    _wire.on_all(engine, check)
    packing.load(optimizer, read[0], optimizer._rule.load_held)


def _marked(state: dict[str, Any], engines: list[_C.Engine]) -> dict[str, Any]:
    """A plain dict has no attributes."""
    marked = state if isinstance(state, OrderedDict) else OrderedDict(state)
    setattr(marked, _MARK, _mark_of(engines))
    return marked


def _mark_of(engines: list[_C.Engine]) -> list[list[int]]:
    return [[engine.rank, engine.world_size, engine.options.stage] for engine in engines]


def _check_mark(state_dict: Any, engines: list[_C.Engine]) -> None:
    """A dict that was copied since has no mark."""
    found = getattr(state_dict, _MARK, None)
    wanted = _mark_of(engines)
    if found is not None and found != wanted:
        raise ValueError(
            f"expected the state dict of {_described(wanted)}, got that of {_described(found)}; "
            f"{_REMEDY}"
        )


def _described(mark: list[list[int]]) -> str:
    return " and ".join(f"rank {rank} of {size}, stage {stage}" for rank, size, stage in mark)


def _checked(
    model: nn.Module,
    state_dict: Any,
    shapes: dict[str, torch.Size],
    strict: bool,
    engines: list[_C.Engine],
) -> dict[str, Any]:
    """By plain name. Raises for names, shapes and marks that don't fit."""
    if not isinstance(state_dict, dict):
        raise TypeError(f"expected state_dict to be a dict, got {type(state_dict).__name__}")
    _check_mark(state_dict, engines)
    given = _names.read(model, state_dict)
    own = _names.to_plain(model, model.state_dict(keep_vars=True))
    missing, unexpected = sorted(set(own) - set(given)), sorted(set(given) - set(own))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"error loading the state dict of rank {engines[0].rank} into "
            f"{type(_names.unwrapped(model)).__name__}: missing keys {missing}, unexpected keys "
            f"{unexpected}"
        )
    for name, value in own.items():
        if name not in given or not isinstance(value, torch.Tensor):
            continue
        expected, got = shapes.get(name, value.shape), given[name].shape
        if got != expected:
            raise ValueError(
                f"'{name}': expected shape {tuple(expected)} (rank {engines[0].rank} of "
                f"{engines[0].world_size}), got {tuple(got)}; {_REMEDY}"
            )
    return given
