"""Names of parameters and modules as the plain model has them.

``torch.compile`` and ``checkpoint_wrapper`` put a module of their own around a user's, and its name
for what it holds into every name below (``_orig_mod.``, ``_checkpoint_wrapped_module.``). Names of
engines, checkpoints, state dicts and errors are without. (A ``ZeroModule`` adds none.)
"""

from __future__ import annotations

import re
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

# Class, and the name that it has for what it wraps. Whoever has not imported the module of
# the class has none of its instances, and importing torch._dynamo takes a second and 70 MB.
_WRAPPERS = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod"),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
    ),
)


def wrapped_name(module: nn.Module) -> str | None:
    """A wrapper's name for the module in it; None for a module that is no wrapper."""
    outer = module
    if _is(module, "zero_torch.module", "ZeroModule"):
        outer = module.__dict__["module"]  # whose submodules it has
    for where, kind, name in _WRAPPERS:
        if _is(outer, where, kind) and name in module._modules:
            return name
    return None


def _is(module: nn.Module, where: str, kind: str) -> bool:
    found = getattr(sys.modules.get(where), kind, None)
    return found is not None and isinstance(module, found)


def unwrapped(module: nn.Module) -> nn.Module:
    """The module inside of all wrappers."""
    while (name := wrapped_name(module)) is not None:
        inner = module._modules[name]
        assert inner is not None
        module = inner
    return module


def walk(module: nn.Module, remove_duplicate: bool = True) -> Iterator[tuple[str, str, nn.Module]]:
    """(torch's name, plain name, module) of a module and all below it, in torch's order.

    A wrapper and what it wraps have one plain name.
    """
    plain_of: dict[str, str] = {}
    wrapper_at: dict[str, str | None] = {}
    for path, part in nn.Module.named_modules(module, remove_duplicate=remove_duplicate):
        parent, _, key = path.rpartition(".")
        if not path:
            plain = ""
        elif wrapper_at[parent] == key:
            plain = plain_of[parent]
        else:
            plain = joined(plain_of[parent], key)
        plain_of[path], wrapper_at[path] = plain, wrapped_name(part)
        yield path, plain, part


def named_modules(
    module: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Module]]:
    """``module.named_modules()`` with plain names."""
    for _, plain, part in walk(module, remove_duplicate):
        yield plain, part


def named_parameters(
    module: nn.Module, remove_duplicate: bool = True
) -> Iterator[tuple[str, nn.Parameter]]:
    """``module.named_parameters()`` with plain names."""
    seen: set[int] = set()
    for plain, part in named_modules(module, remove_duplicate):
        for key, parameter in part._parameters.items():
            if parameter is None or (remove_duplicate and id(parameter) in seen):
                continue
            seen.add(id(parameter))
            yield joined(plain, key), parameter


def named_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """``module.named_buffers()`` with plain names."""
    seen: set[int] = set()
    for plain, part in named_modules(module):
        for key, buffer in part._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield joined(plain, key), buffer


def joined(prefix: str, key: str) -> str:
    return f"{prefix}.{key}" if prefix else key


def plain(module: nn.Module, name: str) -> str:
    """The plain form of torch's name for something in ``module``.

    ``state_dict`` leaves some wrappers out itself.
    """
    kept: list[str] = []
    parts = name.split(".") if name else []
    part: nn.Module | None = module
    at = 0
    while part is not None and at < len(parts):
        wrapped = wrapped_name(part)
        if wrapped is not None:
            at += parts[at] == wrapped
            part = part._modules[wrapped]
            continue
        part = part._modules.get(parts[at])
        kept.append(parts[at])
        at += 1
    return ".".join(kept + parts[at:])


def has_wrappers(module: nn.Module) -> bool:
    return any(wrapped_name(part) is not None for part in nn.Module.modules(module))


def to_plain(module: nn.Module, state_dict: dict[str, Any]) -> dict[str, Any]:
    """A state dict of ``module`` under plain names; the same object where these are torch's."""
    if not has_wrappers(module):
        return state_dict
    renamed = OrderedDict((plain(module, name), value) for name, value in state_dict.items())
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        versions = OrderedDict((plain(module, name), value) for name, value in metadata.items())
        renamed._metadata = versions  # type: ignore[attr-defined]
    return renamed


def read(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A user's state dict under plain names, be its names these or torch's."""
    if not has_wrappers(module):
        return dict(state_dict)
    own = {plain(module, name) for name in module.state_dict(keep_vars=True)}
    return {
        name if name in own else plain(module, name): value for name, value in state_dict.items()
    }


def from_plain(module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """What ``module.load_state_dict`` takes, of plain or torch's names."""
    own = {plain(module, name): name for name in module.state_dict(keep_vars=True)}
    renamed = OrderedDict(
        (own.get(name, name), value) for name, value in read(module, state_dict).items()
    )
    metadata = getattr(state_dict, "_metadata", None)
    if metadata is not None:
        paths = {plain_path: path for path, plain_path, _ in walk(module)}  # the innermost
        versions = OrderedDict((paths.get(name, name), value) for name, value in metadata.items())
        renamed._metadata = versions  # type: ignore[attr-defined]
    return renamed


def load_into(module: nn.Module, state_dict: dict[str, Any], strict: bool) -> None:
    """``module.load_state_dict`` of plain or torch's names; errors show plain ones."""
    if not has_wrappers(module):
        module.load_state_dict(state_dict, strict=strict)
        return
    try:
        module.load_state_dict(from_plain(module, state_dict), strict=strict)
    except RuntimeError as error:
        raise RuntimeError(_with_plain_names(module, str(error))) from None


def _with_plain_names(module: nn.Module, text: str) -> str:
    changed = [(path, name) for path, name, _ in walk(module) if path != name]
    for path, name in reversed(changed):  # inner ones first
        text = re.sub(rf"(?<![\w.]){re.escape(path)}\.", f"{name}." if name else "", text)
    return text
