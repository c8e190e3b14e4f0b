"""What a manifest holds of Python values, as JSON text."""

from __future__ import annotations

import base64
import io
import json
import math
from typing import Any

import torch

# A dict with one of these keys alone stands for what JSON has no form for.
_FLOAT, _TUPLE, _DICT = "$float", "$tuple", "$dict"
_BYTES, _STREAM, _TENSOR = "$bytes", "$stream", "$tensor"
_MARKS = {_FLOAT, _TUPLE, _DICT, _BYTES, _STREAM, _TENSOR}


def to_json(what: str, value: Any) -> str:
    """Of numbers, strings, None, lists and dicts of them with str keys; tuples become lists.

    Tensors of one element become numbers. TypeError that names the place of anything else.
    """
    return json.dumps(_plain(what, value), allow_nan=False)


def to_exact_json(what: str, value: Any) -> str:
    """Of tuples, dicts with other keys, bytes, ``io.BytesIO`` and tensors too.

    ``from_json`` makes the same of it again.
    """
    return json.dumps(_exact(what, value), allow_nan=False)


def _exact(what: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        dtype = str(value.dtype).removeprefix("torch.")
        return {_TENSOR: [dtype, list(value.shape), _encoded(bytes(flat.tolist()))]}
    if isinstance(value, bytes | bytearray):
        return {_BYTES: _encoded(value)}
    if isinstance(value, io.BytesIO):
        return {_STREAM: _encoded(value.getvalue())}
    if isinstance(value, list | tuple):
        items = [_exact(f"{what}[{at}]", item) for at, item in enumerate(value)]
        return {_TUPLE: items} if isinstance(value, tuple) else items
    if isinstance(value, dict):
        items = [[_exact(what, k), _exact(f"{what}[{k!r}]", v)] for k, v in value.items()]
        if all(isinstance(key, str) for key in value) and not _MARKS & set(value):
            return dict(items)
        return {_DICT: items}
    return _plain(what, value)


def from_json(text: str) -> Any:
    return json.loads(text, object_hook=_restore)


def _plain(where: str, value: Any) -> Any:
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
        plain = {key: _plain(f"{where}[{key!r}]", item) for key, item in value.items()}
        return {_DICT: [list(item) for item in plain.items()]} if _MARKS & set(plain) else plain
    raise TypeError(
        f"expected {where} to be a number, a string, None, or a list or dict of these, got "
        f"{type(value).__name__}"
    )


def _restore(value: dict[str, Any]) -> Any:
    mark = next(iter(value)) if len(value) == 1 else None
    if mark not in _MARKS:
        return value
    content = value[mark]
    if mark == _FLOAT:
        return float(content)
    if mark == _TUPLE:
        return tuple(content)
    if mark == _DICT:
        return {key: item for key, item in content}  # noqa: C416
    if mark == _TENSOR:
        dtype, shape, data = content
        flat = torch.tensor(list(_decoded(data)), dtype=torch.uint8, device="cpu")
        return flat.view(getattr(torch, dtype)).reshape(shape)
    return io.BytesIO(_decoded(content)) if mark == _STREAM else _decoded(content)


def _encoded(data: bytes | bytearray) -> str:
    return base64.b64encode(data).decode()


def _decoded(text: str) -> bytes:
    return base64.b64decode(text, validate=True)
