"""What modules keep besides parameters and buffers: ``get_extra_state()``, as in state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from . import _names
from .module import ZeroModule


def of(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: part.get_extra_state() for name, part in owners(model)}


def check(model: nn.Module, states: dict[str, Any], where: str) -> None:
    """ValueError where modules that have such state differ from those that were saved."""
    own = {name for name, _ in owners(model)}
    missing, unexpected = sorted(own - set(states)), sorted(set(states) - own)
    if missing or unexpected:
        raise ValueError(
            f"expected the extra state of this model's modules in '{where}', got missing: "
            f"{missing or 'none'}; unexpected: {unexpected or 'none'} (strict=False leaves these "
            "alone)"
        )


def load(model: nn.Module, states: dict[str, Any]) -> None:
    for name, part in owners(model):
        if name in states:
            part.set_extra_state(states[name])


def owners(model: nn.Module, method: str = "get_extra_state") -> Iterator[tuple[str, nn.Module]]:
    """(torch's name for it, the module) of modules that have a ``method`` of their own."""
    for prefix, part in _names.named_modules(model):
        owner = part.module if isinstance(part, ZeroModule) else part
        if getattr(type(owner), method) is not getattr(nn.Module, method):
            yield _names.joined(prefix, "_extra_state"), owner
