"""The tensors of a model of which some are on the meta device: where each is held, and storage."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from . import _names

# Storage is filled with this byte before a module is initialized: what still has it was not
# written. In floating dtypes it makes NaN, so that what is written in part doesn't pass for values.
_UNWRITTEN = 0xFF


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether an equal tensor on another device can be made of shape, dtype and strides."""
    return (
        not is_lazy(tensor)
        and tensor.layout == torch.strided
        and not is_traceable_wrapper_subclass(tensor)
    )


def like(old: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Uninitialized, and equal in all else: class, shape, strides, dtype, attributes."""
    new = torch.empty_like(old.detach(), device=device)
    if type(old) is nn.Parameter:
        new = nn.Parameter(new, old.requires_grad)
    elif isinstance(old, nn.Parameter):
        new = torch.Tensor._make_subclass(type(old), new, old.requires_grad)
    new.__dict__.update(old.__dict__)
    return new


@dataclass(eq=False)
class Held:
    """One parameter or buffer, under all its names."""

    is_parameter: bool
    was_meta: bool
    persistent: bool = False
    names: list[str] = field(default_factory=list)
    places: list[tuple[nn.Module, str]] = field(default_factory=list)
    last: int = -1
    """Position of the last pending module that holds it."""

    @property
    def tensor(self) -> torch.Tensor:
        module, key = self.places[0]
        tensor: torch.Tensor = getattr(module, key)
        return tensor

    @property
    def parameter(self) -> nn.Parameter:
        tensor = self.tensor
        assert isinstance(tensor, nn.Parameter)
        return tensor

    @property
    def described(self) -> str:
        return f"{'parameter' if self.is_parameter else 'buffer'} '{self.names[0]}'"

    def name_in(self, names: Collection[str]) -> str | None:
        return next((name for name in self.names if name in names), None)

    def allocate(self, device: torch.device) -> None:
        """Replaces the meta tensor wherever the model holds it."""
        new = like(self.tensor, device)
        _bytes(new).fill_(_UNWRITTEN)
        for module, key in self.places:
            setattr(module, key, new)


@dataclass
class Written:
    """Tells whether a tensor was written since ``of()``."""

    module: nn.Module
    key: str
    tensor: torch.Tensor
    version: int

    @staticmethod
    def of(module: nn.Module, key: str) -> Written:
        tensor = getattr(module, key)
        return Written(module, key, tensor, tensor._version)

    def __bool__(self) -> bool:
        now = getattr(self.module, self.key)
        if now is not self.tensor or now._version != self.version or now.numel() == 0:
            return True
        # Writes through .data leave the version.
        contents = _bytes(now)
        return any(bool((part != _UNWRITTEN).any()) for part in (contents[:64], contents))


def own(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """(key, tensor) of the parameters and buffers that a module holds itself."""
    for tensors in (module._parameters, module._buffers):
        for key, tensor in tensors.items():
            if tensor is not None:
                yield key, tensor


def constructed(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module), children before parents: the order in which constructors end."""
    found: list[tuple[str, nn.Module]] = []
    seen: set[int] = set()

    def visit(name: str, module: nn.Module) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        inner = _names.wrapped_name(module)
        for key, child in module.named_children():
            visit(name if key == inner else _names.joined(name, key), child)
        found.append((name, module))

    visit("", root)
    return found


def held_tensors(root: nn.Module, pending: list[nn.Module]) -> list[Held]:
    """Each parameter and buffer once, in the order of ``named_parameters()``."""
    position = {id(module): index for index, module in enumerate(pending)}
    found: dict[int, Held] = {}
    for path, module in _names.named_modules(root, remove_duplicate=False):
        for key, tensor in own(module):
            is_parameter = key in module._parameters
            held = found.setdefault(id(tensor), Held(is_parameter, tensor.is_meta))
            held.names.append(_names.joined(path, key))
            held.last = max(held.last, position.get(id(module), -1))
            if key not in module._non_persistent_buffers_set:
                held.persistent = True
            if not any(module is other and key == k for other, k in held.places):
                held.places.append((module, key))
    return list(found.values())


def attributes(root: nn.Module) -> list[tuple[str, nn.Module]]:
    """(name, module that has it) of meta tensors that are plain attributes."""
    return [
        (_names.joined(path, key), module)
        for path, module in _names.named_modules(root)
        for key, value in vars(module).items()
        # What is computed from parameters is computed again.
        if isinstance(value, torch.Tensor) and value.is_meta and value.grad_fn is None
    ]


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(
            tensor.untyped_storage()
        )
