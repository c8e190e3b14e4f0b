"""Which modules are gathered together at stage 3: ``ZeroConfig.units``, resolved.

The rules live in C++ (``zero/layout/units.h``); here a module's tree is described to them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _C, _names
from .config import ZeroConfig

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


@dataclass
class Found:
    """The units of a target; the first is the root's, which every target has."""

    names: list[str]
    of_parameter: list[int]  # in the order of the parameters given
    modules: list[tuple[nn.Module, int]]  # whose forward is a unit's, the root first


def find_units(
    module: nn.Module | None, parameters: list[tuple[str, torch.Tensor, int]], config: ZeroConfig
) -> Found:
    """The units of ``parameters``, (name, parameter, group) of ``module``, or of none: one unit.

    Raises ValueError for one of ``config.units`` that is no module, or has no forward.
    """
    places = list(_names.walk(module)) if module is not None else []
    chosen = None if module is None else _chosen(_outermost(places), config.units)
    units = _C.make_units(
        _specs(places, chosen or set(), parameters),
        [parameter.numel() for _, parameter, _ in parameters],
        chosen is None,
        config.min_unit_numel,
    )
    return Found(
        units.names,
        units.unit_of_parameter,
        [
            (part, unit)
            for (_, _, part), unit in zip(places, units.unit_of_module, strict=False)
            if unit >= 0
        ],
    )


def _specs(
    places: list[tuple[str, str, nn.Module]],
    chosen: set[int],
    parameters: list[tuple[str, torch.Tensor, int]],
) -> list[_C.ModuleSpec]:
    if not places:
        return [_C.ModuleSpec(name="", parent=-1, type="")]
    index_of_parameter = {id(parameter): i for i, (_, parameter, _) in enumerate(parameters)}
    index_of_module = {path: i for i, (path, _, _) in enumerate(places)}
    specs = []
    for path, name, part in places:
        held = (index_of_parameter.get(id(p)) for p in part.parameters(recurse=False))
        kind = type(_names.unwrapped(part))
        specs.append(
            _C.ModuleSpec(
                name=name,
                parent=index_of_module[path.rpartition(".")[0]] if path else -1,
                type=f"{kind.__module__}.{kind.__qualname__}",
                list=isinstance(part, _LISTS),
                chosen=id(part) in chosen,
                parameters=[index for index in held if index is not None],
                called=_has_forward(part),
            )
        )
    return specs


def _outermost(places: list[tuple[str, str, nn.Module]]) -> list[tuple[str, nn.Module]]:
    """(plain name, module) without what a wrapper has in it, whose forward is the wrapper's."""
    inside = {
        id(part._modules[name])
        for _, _, part in places
        if (name := _names.wrapped_name(part)) is not None
    }
    return [(name, part) for _, name, part in places if id(part) not in inside]


def _chosen(named: list[tuple[str, nn.Module]], units: Any) -> set[int] | None:
    """The modules that ``units`` picks, by id; None where the default decides."""
    if units is None:
        return None
    if callable(units) and not isinstance(units, type):
        picked = [(name, part) for name, part in named if units(name, _names.unwrapped(part))]
    else:
        picked = [item for unit in units for item in _picked_by(unit, named)]
    for name, part in picked:
        if name and not _has_forward(part):
            raise ValueError(
                f"units: module '{name}' is a {type(part).__name__}, which has no forward to "
                "gather for; choose its children"
            )
    return {id(part) for _, part in picked}


def _picked_by(
    unit: str | type[nn.Module], named: list[tuple[str, nn.Module]]
) -> Iterable[tuple[str, nn.Module]]:
    if isinstance(unit, str):
        picked = [(name, part) for name, part in named if name == unit]
        expected, got = "the name of a module", repr(unit)
        there = [repr(name) for name, _ in named if name]
    else:
        picked = [(name, part) for name, part in named if _is_a(part, unit)]
        expected, got = "a class that a module is an instance of", unit.__qualname__
        there = sorted({type(_names.unwrapped(part)).__name__ for _, part in named})
    if not picked:
        some = ", ".join(there[:6]) + (" ..." if len(there) > 6 else "")
        raise ValueError(f"units: expected {expected}, got {got}; there are {some}")
    return picked


def _is_a(module: nn.Module, kind: type[nn.Module]) -> bool:
    return isinstance(module, kind) or isinstance(_names.unwrapped(module), kind)


def _has_forward(module: nn.Module) -> bool:
    return getattr(type(_names.unwrapped(module)), "forward", None) is not nn.Module.forward
