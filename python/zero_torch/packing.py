"""torch's format of an optimizer's state dict, made of shards and taken apart again."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch

from . import native

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


def pack(optimizer: ZeroOptimizer, *, keep: bool) -> dict[str, Any]:
    """torch's own packing, over whole states that live as long as it takes.

    Collective at stages 1 to 3. Without ``keep`` this rank only takes part, and gets ``{}``.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, state in optimizer._rule.states(range(len(parameters))):
        if keep:
            optimizer.state[parameters[index]] = state
        del state  # before the next one is made
    try:
        return torch.optim.Optimizer.state_dict(optimizer) if keep else {}
    finally:
        optimizer.state = defaultdict(dict)


def unpack(
    optimizer: ZeroOptimizer, state_dict: dict[str, Any]
) -> tuple[dict[int, Any], list[dict[str, Any]]]:
    """(states by index, groups without 'params') of a state dict that fits the optimizer."""
    saved = state_dict["param_groups"]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if [len(group["params"]) for group in saved] != sizes:
        raise ValueError(
            f"expected param groups of {sizes} parameters, got "
            f"{[len(group['params']) for group in saved]} in the state dict"
        )
    keys = [key for group in saved for key in group["params"]]
    group_of = [group for group in saved for _ in group["params"]]
    groups = [{k: v for k, v in group.items() if k != "params"} for group in saved]
    if optimizer._name is not None:
        for group in groups:
            native.check_group(optimizer._name, {**optimizer.defaults, **group})
    states = {}
    for index, key in enumerate(keys):
        state = {k: v for k, v in state_dict["state"].get(key, {}).items() if v is not None}
        if state:
            name, parameter, _ = optimizer._live.parameter(index)
            optimizer._rule.check_state(name, parameter, state, group_of[index])
            states[index] = state
    return states, groups
