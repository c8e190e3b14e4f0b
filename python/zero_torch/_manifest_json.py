"""What a manifest holds of Python values, as JSON text."""

from __future__ import annotations

import json
import math
from typing import Any

import torch


def to_json(what: str, value: Any) -> str:
    return json.dumps(_plain(what, value), allow_nan=False)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_restore)


_FLOAT = "$float"  # of what JSON has no number for


def _restore(value: dict[str, Any]) -> Any:
    return float(value[_FLOAT]) if set(value) == {_FLOAT} else value


def _plain(where: str, value: Any) -> Any:
    """``value`` in JSON's types; tensors of one element become numbers."""
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(value)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return _plain(where, value.item())
    if isinstance(value, list | tuple):
        return [_plain(f"{where}[{at}]", item) for at, item in enumerate(value)]
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise TypeError(f"expected the keys of {where} to be str, got {key!r}")
        return {key: _plain(f"{where}[{key!r}]", item) for key, item in value.items()}
    raise TypeError(
        f"expected {where} to be a number, a string, None, or a list or dict of these, got "
        f"{type(value).__name__}"
    )
