"""Under torch.autocast, autograd keeps a cast copy of every weight: here it keeps a recipe instead.

At stage 3 a unit's weights are freed after its forward. Their casts would stay until backward, the
whole model in the low precision. The recipe (parameter, dtype, geometry) casts again in backward,
where reading the parameter has the engine gather it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

_DEVICE_TYPES = ("cpu", "cuda")
_Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class CastPacking:
    """Saved-tensor hooks for a root module's forward, active when autocast and grad mode are on.

    ``is_managed(parameter)`` says whether a tensor is a parameter that the engine gathers.

    ``enter()`` belongs into the root's forward pre-hook and ``exit()`` into its forward hook; pairs
    nest. After an exception in forward the caller still calls ``exit()`` (a forward hook registered
    with ``always_call=True`` does). Both act on the calling thread only.

    While active:

    - A saved tensor that is the cast of a managed parameter, or a view of it, is computed again in
      backward. Its values are the same, so gradients are too.
    - The autocast weight cache is off, since it would keep the casts as well. A weight that is used
      twice is then cast twice, and its two gradients are added in its own dtype rather than in the
      low precision.
    - Anything else is kept as autograd would, with the same error when it is modified before
      backward; hooks that were pushed outside (``save_on_cpu``) go on receiving these tensors.

    Not covered: parameters with ``requires_grad=False``, whose casts carry no trace of where they
    come from; tensors saved under hooks that the model pushes itself (activation checkpointing
    keeps no casts anyway); autocast that begins inside the root's forward.
    """

    def __init__(self, is_managed: Callable[[torch.Tensor], bool]) -> None:
        self._is_managed = is_managed
        self._frames: list[_Frame | None] = []

    @property
    def active(self) -> bool:
        return any(frame is not None for frame in self._frames)

    def enter(self) -> None:
        """Pushes the hooks where they are needed. Each call is matched by one of ``exit()``."""
        frame = None
        if not self.active and _casts_are_saved():
            outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
            packing = _Packing(self._is_managed, outer)
            hooks = saved_tensors_hooks(packing.pack, packing.unpack)
            hooks.__enter__()
            frame = _Frame(hooks, torch.is_autocast_cache_enabled())
            torch.set_autocast_cache_enabled(False)
            torch.clear_autocast_cache()
        self._frames.append(frame)

    def exit(self) -> None:
        """Undoes the latest ``enter()``; nothing when there is none."""
        frame = self._frames.pop() if self._frames else None
        if frame is not None:
            torch.set_autocast_cache_enabled(frame.cache_enabled)
            frame.hooks.__exit__(None, None, None)


@dataclass
class _Frame:
    hooks: saved_tensors_hooks
    cache_enabled: bool


@dataclass
class _Cast:
    """How to compute a cast of ``parameter``, or a view of one, again."""

    parameter: torch.Tensor
    version: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass
class _Kept:
    tensor: torch.Tensor
    version: int


class _Packing:
    def __init__(self, is_managed: Callable[[torch.Tensor], bool], outer: _Hooks | None) -> None:
        self._is_managed = is_managed
        self._outer = outer

    def pack(self, tensor: torch.Tensor) -> Any:
        parameter = _cast_from(tensor)
        if parameter is not None and self._is_managed(parameter):
            return _Cast(
                parameter,
                parameter._version,
                tensor.dtype,
                tensor.size(),
                tensor.stride(),
                int(tensor.storage_offset()),
            )
        if self._outer is not None:
            return self._outer[0](tensor)
        # Detached: an operation's own result would keep the operation alive, and it the result.
        return _Kept(tensor.detach(), tensor._version)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, _Cast):
            _check_version(packed.parameter, packed.version)
            whole = packed.parameter.detach().to(packed.dtype)
            return whole.as_strided(packed.size, packed.stride, packed.offset)
        if isinstance(packed, _Kept):
            _check_version(packed.tensor, packed.version)
            return packed.tensor
        assert self._outer is not None
        return self._outer[1](packed)


def _casts_are_saved() -> bool:
    # torch.func forbids hooks inside its transforms.
    return (
        torch.is_grad_enabled()
        and any(torch.is_autocast_enabled(kind) for kind in _DEVICE_TYPES)
        and torch._C._autograd._saved_tensors_hooks_is_enabled()  # type: ignore[attr-defined]
    )


def _cast_from(tensor: torch.Tensor) -> torch.Tensor | None:
    """The leaf of which ``tensor`` is an unmodified cast, or a view of one, of the same layout."""
    cast = tensor if tensor._base is None else tensor._base
    copy = cast.grad_fn
    if copy is None or copy.name() != "ToCopyBackward0" or tensor._version != 0:
        return None
    source = copy.next_functions[0][0]
    leaf = getattr(source, "variable", None)  # of an AccumulateGrad
    if (
        isinstance(leaf, torch.Tensor)
        and leaf.dtype != cast.dtype
        and tensor.dtype == cast.dtype
        and leaf.device == cast.device
        and leaf.size() == cast.size()
        and leaf.stride() == cast.stride()
    ):
        return leaf
    return None


def _check_version(tensor: torch.Tensor, version: int) -> None:
    """autograd's own check, which it leaves out where there are hooks."""
    if tensor._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {tuple(tensor.shape)} and dtype {tensor.dtype} is at "
            f"version {tensor._version}, expected version {version}; call backward() before what "
            "modifies it, or modify a clone"
        )
