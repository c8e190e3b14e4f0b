"""Which parameters a target has, under which names, and which of them can't be sharded.

Everything here runs before the first collective, so that a bad argument is an error on the rank
that made it and never a hang.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _names, _registry

Named = list[tuple[str, torch.Tensor]]


@dataclass
class Collected:
    """Parameters by group: ``groups`` as torch.optim.Optimizer takes them, ``names`` for errors."""

    groups: list[dict[str, Any]]
    names: list[list[str]]
    buffers: Named = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)
    first: int = 0  # index of the first group

    def named(self) -> list[tuple[str, torch.Tensor, int]]:
        """(name, parameter, group index) of all, in order."""
        return [
            (name, _tensor(item), index)
            for index, (group, names) in enumerate(
                zip(self.groups, self.names, strict=True), self.first
            )
            for name, item in zip(names, group["params"], strict=True)
        ]

    @property
    def device(self) -> torch.device:
        """Of the first parameter."""
        return next(parameter.device for _, parameter, _ in self.named())

    def replace(self, parameters: Sequence[torch.Tensor]) -> None:
        """Other tensors in place of the parameters, in order."""
        rest = iter(parameters)
        for group in self.groups:
            group["params"] = [
                (item[0], next(rest)) if isinstance(item, tuple) else next(rest)
                for item in group["params"]
            ]


def collect(
    target: Any, ignored_params: Any = (), *, deferred: bool = False, groups: Any = None
) -> Collected:
    """The parameters of a module, or of an iterable of parameters, (name, parameter) or groups.

    ``deferred``: parameters and buffers without storage are allowed. ``groups``: of a module's
    parameters; those that are in none must be frozen, and become one more.

    A parameter that a module holds in several places counts once, under its first name; names are
    those of the plain model.
    Raises TypeError or ValueError naming the parameter that can't be sharded.
    """
    if isinstance(target, nn.Module):
        pairs: Named = list(_names.named_parameters(target))
        collected = _collect_module(pairs, groups)
        collected.buffers = list(_names.named_buffers(target))
        ignored_params = _plain_names(target, ignored_params)
    elif groups is not None:
        raise TypeError("expected an nn.Module with param_groups; pass the groups as target here")
    else:
        collected = _collect_iterable(target)
    _drop_ignored(collected, ignored_params)
    if groups is not None:
        _finish_groups(collected)
    check(collected.named(), deferred=deferred)
    for name, buffer in collected.buffers:
        if not deferred:
            _check_materialized(f"buffer '{name}'", buffer)
    return collected


def parameters_of_batch_norms(module: nn.Module | None) -> set[int]:
    """Their ids. They keep their dtype in mixed precision, as statistics do.

    torch's batch norms take inputs of 16 bits with parameters and statistics of fp32.
    """
    norms = [m for m in (() if module is None else module.modules()) if isinstance(m, _BatchNorm)]
    return {id(parameter) for norm in norms for parameter in norm.parameters(recurse=False)}


def collect_group(group: Any, index: int, names: dict[int, str]) -> Collected:
    """One more group, the ``index``-th, for add_param_group(). ``names``: by id, where known."""
    if not isinstance(group, dict):
        raise TypeError(f"expected param_group to be a dict, got {type(group).__name__}")
    collected = _collect_groups([group], index)
    collected.names = [
        [
            names.get(id(_tensor(item)), name)
            for name, item in zip(collected.names[0], collected.groups[0]["params"], strict=True)
        ]
    ]
    check(collected.named())
    return collected


def check(parameters: Sequence[tuple[str, torch.Tensor, int]], *, deferred: bool = False) -> None:
    """Raises TypeError or ValueError for parameters that can't be sharded, by name."""
    if not parameters:
        raise ValueError("expected at least one parameter, got an empty parameter list")
    first_name: dict[int, str] = {}
    seen: set[str] = set()
    for name, parameter, _ in parameters:
        _check_one(name, parameter, deferred=deferred)
        if id(parameter) in first_name:
            raise ValueError(
                f"expected each parameter once, got '{name}' twice "
                f"(first as '{first_name[id(parameter)]}')"
            )
        if name in seen:
            raise ValueError(f"expected different names, got '{name}' for two parameters")
        first_name[id(parameter)] = name
        seen.add(name)
    pairs = [(name, parameter) for name, parameter, _ in parameters]
    _registry.refuse_managed(pairs)  # before anything looks at their memory
    _check_overlap(pairs)


def _collect_module(pairs: Named, groups: Any) -> Collected:
    """In one group, or in the given ones and a last one of those that are in none."""
    if groups is None:
        return Collected([{"params": [p for _, p in pairs]}], [[name for name, _ in pairs]])
    if isinstance(groups, dict | torch.Tensor | str) or not isinstance(groups, Iterable):
        raise TypeError(f"expected param_groups to be a list of dicts, got {groups!r}")
    given = list(groups)
    if not all(isinstance(group, dict) for group in given):
        raise TypeError("expected param_groups to hold dicts with 'params' only")
    collected = _collect_groups(given, 0)
    name_of = {id(parameter): name for name, parameter in pairs}
    left = dict(name_of)
    for group, names in zip(collected.groups, collected.names, strict=True):
        for position, item in enumerate(group["params"]):
            name = name_of.get(id(_tensor(item)))
            if name is None:
                raise ValueError(f"{names[position]} is not one of the module's parameters")
            names[position] = name
            left.pop(id(_tensor(item)), None)
    rest = [(name, parameter) for name, parameter in pairs if id(parameter) in left]
    collected.groups.append({"params": [parameter for _, parameter in rest]})
    collected.names.append([name for name, _ in rest])
    return collected


def _finish_groups(collected: Collected) -> None:
    rest = zip(collected.names[-1], collected.groups[-1]["params"], strict=True)
    for name, parameter in rest:
        if parameter.requires_grad:
            raise ValueError(
                f"parameter '{name}' is in none of the param_groups; add it to one, freeze it, or "
                "name it in ignored_params"
            )
    if not collected.names[-1]:
        del collected.groups[-1], collected.names[-1]


def _collect_iterable(target: Any) -> Collected:
    if isinstance(target, torch.Tensor | str | dict) or not isinstance(target, Iterable):
        raise TypeError(
            "expected target to be an nn.Module, a ZeroModule or an iterable of parameters, "
            f"(name, parameter) pairs or param groups; got {type(target).__name__}"
        )
    _refuse_set("target", target)
    items = list(target)
    if any(isinstance(item, dict) for item in items):
        if not all(isinstance(item, dict) for item in items):
            raise TypeError("expected target to hold only param groups, or only parameters")
        return _collect_groups(items, 0)
    return _collect_groups([{"params": items}], 0)


def _collect_groups(groups: Iterable[dict[str, Any]], first: int) -> Collected:
    collected = Collected([], [], first=first)
    for index, given in enumerate(groups, first):
        if "params" not in given:
            raise ValueError(f"expected group {index} to have 'params', got {sorted(given)}")
        params = given["params"]
        _refuse_set(f"'params' of group {index}", params)
        group = dict(given)
        group["params"] = [params] if isinstance(params, torch.Tensor) else list(params)
        collected.groups.append(group)
        collected.names.append(
            [
                item[0] if isinstance(item, tuple) else f"group {index} parameter {position}"
                for position, item in enumerate(group["params"])
            ]
        )
    return collected


def _refuse_set(what: str, value: Any) -> None:
    if isinstance(value, set | frozenset):
        raise TypeError(
            f"expected {what} to be ordered, got a set: ranks would disagree on the order"
        )


def _tensor(item: Any) -> torch.Tensor:
    tensor = item[1] if isinstance(item, tuple) and len(item) == 2 else item
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"expected parameters to be tensors, got {torch.typename(tensor)}")
    return tensor


def _plain_names(module: nn.Module, ignored_params: Any) -> Any:
    if isinstance(ignored_params, str | torch.Tensor) or not isinstance(ignored_params, Iterable):
        return ignored_params  # _drop_ignored() refuses it
    own = {name for name, _ in _names.named_parameters(module)}
    return [
        _names.plain(module, item) if isinstance(item, str) and item not in own else item
        for item in ignored_params
    ]


def _drop_ignored(collected: Collected, ignored_params: Any) -> None:
    if isinstance(ignored_params, str | torch.Tensor) or not isinstance(ignored_params, Iterable):
        raise TypeError(
            f"expected ignored_params to be a list of names or parameters, got {ignored_params!r}"
        )
    names = {name: parameter for name, parameter, _ in collected.named()}
    ids = {id(parameter): name for name, parameter in names.items()}
    ignored = set()
    for item in ignored_params:
        name = item if isinstance(item, str) else ids.get(id(item))
        if name not in names:
            described = repr(item) if isinstance(item, str) else f"a {type(item).__name__}"
            raise ValueError(f"ignored_params: {described} is not one of the target's parameters")
        ignored.add(name)
    if not ignored:
        return
    for index, group in enumerate(collected.groups):
        kept = [
            (name, item)
            for name, item in zip(collected.names[index], group["params"], strict=True)
            if name not in ignored
        ]
        group["params"] = [item for _, item in kept]
        collected.names[index] = [name for name, _ in kept]
    collected.ignored = sorted(ignored)


def _check_one(name: str, parameter: torch.Tensor, *, deferred: bool) -> None:
    if any(kind.__name__ == "DTensor" for kind in type(parameter).__mro__):
        raise TypeError(
            f"parameter '{name}' is a DTensor, which is distributed already; "
            "shard the plain model with Zero, or keep torch's parallelism for it"
        )
    if not (deferred and parameter.is_meta):
        _check_materialized(f"parameter '{name}'", parameter)
    if is_traceable_wrapper_subclass(parameter):
        raise TypeError(
            f"parameter '{name}' is a {type(parameter).__name__}, which has no memory of its own "
            "to shard; expected a plain parameter"
        )
    if parameter.layout != torch.strided:
        raise TypeError(f"parameter '{name}' has layout {parameter.layout}; expected torch.strided")
    if parameter.is_complex():
        raise TypeError(
            f"parameter '{name}' is {parameter.dtype}; expected a real dtype "
            "(store torch.view_as_real() of it and make it complex in forward)"
        )
    if not parameter.is_leaf:
        raise ValueError(f"parameter '{name}' is computed from others; expected a leaf tensor")


def _check_materialized(what: str, tensor: torch.Tensor) -> None:
    if is_lazy(tensor):
        raise ValueError(f"{what} is lazy and has no shape yet; run one forward before sharding")
    if tensor.is_meta:
        raise ValueError(
            f"{what} is on the meta device and has no values; pass the module itself, so that it "
            "is materialized, or do so before sharding"
        )


def _check_overlap(parameters: Named) -> None:
    """Parameters move into flat buffers, so two that share memory would quietly part."""
    extents = []
    for name, parameter in parameters:
        if parameter.numel() == 0 or parameter.is_meta:
            continue
        sizes = zip(parameter.shape, parameter.stride(), strict=True)
        last = sum((size - 1) * stride for size, stride in sizes)
        begin = parameter.data_ptr()
        end = begin + (last + 1) * parameter.element_size()
        extents.append((str(parameter.device), begin, end, name))
    extents.sort()
    for (device, _, end, name), (other_device, begin, _, other) in itertools.pairwise(extents):
        if device == other_device and begin < end:
            raise ValueError(
                f"parameters '{name}' and '{other}' share memory; to tie them, use one Parameter "
                "object in both places"
            )
