"""What modules keep besides parameters and buffers: ``get_extra_state()``, as in state dicts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from . import _names


def of(model: nn.Module) -> dict[str, Any]:
    """By name."""
    return {name: part.get_extra_state() for name, part in _owners(model)}


def check(model: nn.Module, states: dict[str, Any], where: str) -> None:
    """ValueError where modules that have such state differ from those that were saved."""
    own = {name for name, _ in _owners(model)}
    missing, unexpected = sorted(own - set(states)), sorted(set(states) - own)
    if missing or unexpected:
        raise ValueError(
            f"expected the extra state of this model's modules in '{where}', got missing: "
            f"{missing or 'none'}; unexpected: {unexpected or 'none'} (strict=False leaves these "
            "alone)"
        )


def load(model: nn.Module, states: dict[str, Any]) -> None:
    for name, part in _owners(model):
        if name in states:
            part.set_extra_state(states[name])


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for prefix, part in _names.named_modules(model):
        if type(part).get_extra_state is not nn.Module.get_extra_state:
            yield _names.joined(prefix, "_extra_state"), part
