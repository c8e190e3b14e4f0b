"""State dicts of sharded models and optimizers, in torch's names, values and shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import _C, _hooks, _registry, _wire, packing
from .inspect import engines_of, gathered
from .optimizer import ZeroOptimizer


def state_dict(model: nn.Module, full: bool = True, rank0_only: bool = True) -> dict[str, Any]:
    """The model's state dict with whole values: on rank 0, elsewhere ``{}``; or on every rank.

    At stages 0-2 the values are the model's own memory, as in torch, and nothing is communicated.
    At stage 3, and of parameters that have fp32 masters, which are what is given then, they are
    copies, made whole one after the other: collective, and with ``rank0_only`` the other ranks hold
    one at a time. ``full=False`` (this rank's shards) is not built yet.
    """
    _require_full(full)
    engines = engines_of(model)
    for engine in engines:
        engine.wait_parameters()
    if not (rank0_only and any(engine.rank != 0 for engine in engines)):
        return model.state_dict()
    if any(map(_hooks.gathers_state, engines)):
        with _hooks.dropping_values():
            model.state_dict()
    return {}


def optimizer_state_dict(
    optimizer: ZeroOptimizer, full: bool = True, rank0_only: bool = True
) -> dict[str, Any]:
    """``optimizer.state_dict()``: on rank 0, elsewhere ``{}``; or on every rank.

    torch's format with whole tensors. Collective at stages 1 to 3; other ranks hold the state of
    one parameter at a time with ``rank0_only``. ``full=False`` is not built yet.
    """
    _require_full(full)
    _require_optimizer(optimizer)
    return packing.pack(optimizer, keep=not rank0_only or optimizer._live.rank == 0)


def load_state_dict(
    target: nn.Module | ZeroOptimizer,
    state_dict: dict[str, Any] | None,
    *,
    strict: bool = True,
    rank0_only: bool = True,
) -> None:
    """Loads what ``state_dict`` or ``optimizer_state_dict`` gave, or a plain torch state dict.

    With ``rank0_only``, rank 0's ``state_dict`` goes to all ranks and what the others pass is not
    looked at: collective. Otherwise every rank passes the same one, and nothing is communicated.
    ``strict`` is of ``nn.Module.load_state_dict``. When rank 0 can't load it, every rank raises.
    """
    if isinstance(target, ZeroOptimizer):
        engine = target._live
        if rank0_only and engine.world_size > 1:
            state_dict = _share_state(engine, state_dict)
        target.load_state_dict(given(state_dict))
        return
    if not isinstance(target, nn.Module):
        raise TypeError(f"expected a module or a ZeroOptimizer, got {type(target).__name__}")
    engines = engines_of(target)
    if not (rank0_only and engines and engines[0].world_size > 1):
        target.load_state_dict(given(state_dict), strict=strict)
        return
    engine = engines[0]
    if any(other.options.stage == 3 or _hooks.has_masters(other) for other in engines):
        _load_sharded(target, engine, state_dict, strict)
        return
    _wire.on_rank_0(engine, lambda: target.load_state_dict(given(state_dict), strict=strict))
    unmanaged = [p for p in target.parameters() if _registry.find(p) is None]
    for other in engines:
        other.broadcast_parameters(list(range(other.parameter_count())), 0)
    engine.broadcast([p.detach() for p in unmanaged] + list(target.buffers()), 0)


def _load_sharded(
    module: nn.Module, engine: _C.Engine, state_dict: dict[str, Any] | None, strict: bool
) -> None:
    """Rank 0's values, one module's own parameters at a time."""
    names = _wire.on_rank_0(engine, lambda: sorted(given(state_dict)))
    wanted = dict.fromkeys(module.state_dict(keep_vars=True))
    missing, unexpected = sorted(set(wanted) - set(names)), sorted(set(names) - set(wanted))
    if strict and (missing or unexpected):
        raise RuntimeError(
            f"error loading the state dict of rank 0 into {type(module).__name__}: missing keys "
            f"{missing}, unexpected keys {unexpected}"
        )
    _wire.on_rank_0(engine, lambda: _check_shapes(module, given(state_dict)))
    for prefix, part in module.named_modules():
        own = dict(part.named_parameters(recurse=False)) | dict(part.named_buffers(recurse=False))
        chosen = [key for key in own if (f"{prefix}.{key}" if prefix else key) in names]
        if not chosen:
            continue
        with gathered([own[key] for key in chosen], writeback=True), torch.no_grad():
            if engine.rank == 0:
                for key in chosen:
                    own[key].copy_(given(state_dict)[f"{prefix}.{key}" if prefix else key])
        engine.broadcast([own[k].detach() for k in chosen if _registry.find(own[k]) is None], 0)
        for key in chosen:
            _share_master(own[key], state_dict, f"{prefix}.{key}" if prefix else key)


def _share_master(parameter: torch.Tensor, state_dict: dict[str, Any] | None, name: str) -> None:
    """Rank 0's fp32 value of a parameter that computes in 16 bits."""
    found = _registry.find(parameter)
    if found is None:
        return
    engine, index = found
    if engine.has_master(index):
        master = torch.empty_like(parameter, dtype=torch.float32)
        if engine.rank == 0:
            master.copy_(given(state_dict)[name])
        engine.broadcast([master], 0)
        engine.load_master(index, master)


def _check_shapes(module: nn.Module, state_dict: dict[str, Any]) -> None:
    for name, value in module.state_dict(keep_vars=True).items():
        given = state_dict.get(name)
        if given is not None and given.shape != value.shape:
            raise RuntimeError(
                f"'{name}': expected shape {tuple(value.shape)}, got {tuple(given.shape)}"
            )


def _share_state(engine: _C.Engine, state_dict: dict[str, Any] | None) -> dict[str, Any]:
    """Rank 0's optimizer state dict on every rank: structure first, then tensor by tensor."""
    tensors: list[torch.Tensor] = []

    def describe() -> dict[str, Any]:
        source = given(state_dict)
        states = {}
        for key, state in source["state"].items():
            states[key] = {name: _describe(value, tensors) for name, value in state.items()}
        return {**source, "state": states}

    shared: dict[str, Any] = _wire.on_rank_0(engine, describe)
    if engine.rank != 0:
        for state in shared["state"].values():
            tensors += [torch.empty(v.shape, dtype=v.dtype) for v in state.values() if _is_slot(v)]
    engine.broadcast(tensors, 0)
    whole = iter(tensors)
    for state in shared["state"].values():
        state.update({name: next(whole) for name, value in state.items() if _is_slot(value)})
    return shared


class _Slot:
    """Where a tensor of rank 0 goes."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype


def _describe(value: Any, tensors: list[torch.Tensor]) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return value
    tensors.append(value.detach().cpu().contiguous())
    return _Slot(value)


def _is_slot(value: Any) -> bool:
    return isinstance(value, _Slot)


def given(state_dict: dict[str, Any] | None) -> dict[str, Any]:
    if not isinstance(state_dict, dict):
        raise TypeError(f"expected state_dict to be a dict, got {type(state_dict).__name__}")
    return state_dict


def _require_full(full: bool) -> None:
    if not full:
        raise NotImplementedError("full=False is not built yet; leave it at True")


def _require_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(f"expected a ZeroOptimizer, got {type(optimizer).__name__}")
