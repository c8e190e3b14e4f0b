"""torch's format of an optimizer's state dict, made of states and taken apart again."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from . import _wire, native

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


@dataclass
class Unpacked:
    """A state dict that has the optimizer's groups."""

    states: Mapping[int, dict[str, Any]]  # by index, of those that have any
    groups: list[dict[str, Any]]  # without 'params'
    group_of: list[dict[str, Any]]  # of each parameter


def pack(
    optimizer: ZeroOptimizer, states: Iterable[tuple[int, dict[str, Any]]], *, keep: bool
) -> dict[str, Any]:
    """torch's own packing of (index, state), which live as long as it takes.

    Without ``keep`` this rank only takes part in making them, and gets ``{}``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in states:
        if keep:
            optimizer.state[parameters[index]] = state
        del state  # before the next one is made
    try:
        return torch.optim.Optimizer.state_dict(optimizer) if keep else {}
    finally:
        optimizer.state = defaultdict(dict)


def pack_whole(optimizer: ZeroOptimizer, *, keep: bool) -> dict[str, Any]:
    """Whole states. Collective at stages 1 to 3."""
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    with _wire.collective("optimizer.state_dict"):
        return pack(optimizer, optimizer._rule.states(range(count)), keep=keep)


def unpack(optimizer: ZeroOptimizer, state_dict: dict[str, Any]) -> Unpacked:
    """Raises ValueError where the groups are not the optimizer's."""
    state_dict = dict(state_dict)
    for pre_hook in optimizer._optimizer_load_state_dict_pre_hooks.values():
        state_dict = pre_hook(optimizer, state_dict) or state_dict
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in saved] != sizes:
        raise ValueError(
            f"expected param groups of {sizes} parameters, got "
            f"{[len(group['params']) for group in saved]} in the state dict"
        )
    keys = [key for group in saved for key in group["params"]]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved]
    if optimizer._name is not None:
        for group in groups:
            native.check_group(optimizer._name, {**optimizer.defaults, **group})
    states: dict[int, dict[str, Any]] = {}
    for index, key in enumerate(keys):
        state = {k: v for k, v in state_dict["state"].get(key, {}).items() if v is not None}
        if state:
            states[index] = state
    return Unpacked(states, groups, [group for group in saved for _ in group["params"]])


def check(
    optimizer: ZeroOptimizer, unpacked: Unpacked, shapes: Mapping[int, tuple[int, ...]]
) -> None:
    """Raises ValueError, by name, for states that the rule has not, or of other ``shapes``."""
    for index, state in unpacked.states.items():
        name = optimizer._live.parameter(index)[0]
        optimizer._rule.check_state(name, shapes[index], state, unpacked.group_of[index])


def load(
    optimizer: ZeroOptimizer,
    unpacked: Unpacked,
    replace: Callable[[Mapping[int, dict[str, Any]], list[dict[str, Any]]], None],
) -> None:
    """Takes what was checked; ``replace`` is the rule's, for states of these shapes."""
    for group, loaded in zip(optimizer.param_groups, unpacked.groups, strict=True):
        group.update(loaded)
    replace(unpacked.states, optimizer.param_groups)
    for post_hook in optimizer._optimizer_load_state_dict_post_hooks.values():
        post_hook(optimizer)
