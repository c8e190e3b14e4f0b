"""State dicts of sharded models and optimizers, in torch's names, values and shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import _C, _extra_state, _hooks, _names, _registry, _wire, packing, shards
from .inspect import engines_of, gathered
from .optimizer import ZeroOptimizer


def state_dict(model: nn.Module, full: bool = True, rank0_only: bool = True) -> dict[str, Any]:
    """The model's state dict with whole values: on rank 0, elsewhere ``{}``; or on every rank.

    At stages 0-2 the values are the model's own memory, as in torch, and nothing is communicated.
    At stage 3, and of parameters that have fp32 masters, which are what is given then, they are
    copies, made whole one after the other: collective, and with ``rank0_only`` the other ranks hold
    one at a time. Names are those of the plain model, also where ``torch.compile`` or
    ``checkpoint_wrapper`` are in it.

    ``full=False``: on each rank what that rank holds, for ``load_state_dict(..., full=False)``.
    Nothing is communicated. What is sharded is this rank's run of elements: a one-dimensional copy,
    in the parameter's order in memory, empty where this rank has none of it; at stage 3 of all
    parameters, at stages 1 and 2 of fp32 masters. The rest is whole.
    """
    if not full:
        return shards.model_state_dict(model)
    engines = engines_of(model)
    for engine in engines:
        engine.wait_parameters()
    if not (rank0_only and any(engine.rank != 0 for engine in engines)):
        return _names.to_plain(model, model.state_dict())
    if any(map(_hooks.gathers_state, engines)):
        with _hooks.dropping_values():
            model.state_dict()
    return {}


def optimizer_state_dict(
    optimizer: ZeroOptimizer, full: bool = True, rank0_only: bool = True
) -> dict[str, Any]:
    """``optimizer.state_dict()``: on rank 0, elsewhere ``{}``; or on every rank.

    torch's format with whole tensors. Collective at stages 1 to 3; other ranks hold the state of
    one parameter at a time with ``rank0_only``.

    ``full=False``: the same of what this rank holds; nothing is communicated. At stages 1 to 3
    state tensors are this rank's run of elements, as in ``state_dict``; step counts are whole. Of a
    torch.optim class, a rank has no entry for parameters of which it holds nothing.
    """
    _require_optimizer(optimizer)
    if not full:
        return shards.optimizer_state_dict(optimizer)
    return packing.pack_whole(optimizer, keep=not rank0_only or optimizer._live.rank == 0)


@_wire.collective("load_state_dict")
def load_state_dict(
    target: nn.Module | ZeroOptimizer,
    state_dict: dict[str, Any] | None,
    *,
    full: bool = True,
    strict: bool = True,
    rank0_only: bool = True,
) -> None:
    """Loads what ``state_dict`` or ``optimizer_state_dict`` gave, or a plain torch state dict.

    With ``rank0_only``, rank 0's ``state_dict`` goes to all ranks and what the others pass is not
    looked at: collective. Otherwise every rank passes the same one, and nothing is communicated.
    ``strict`` is of ``nn.Module.load_state_dict``. When rank 0 can't load it, every rank raises.

    ``full=False``: each rank passes what it got with ``full=False``. Collective. Names, shapes and
    whose it is are compared on all ranks before anything is changed; every rank raises where they
    don't fit one: such a dict loads only at the same number of ranks, stage and layout.
    """
    if isinstance(target, ZeroOptimizer):
        engine = target._live
        if not full:
            shards.load_optimizer(target, state_dict)
            return
        if rank0_only and engine.world_size > 1:
            state_dict = _share_state(engine, state_dict)
        target.load_state_dict(given(state_dict))
        return
    if not isinstance(target, nn.Module):
        raise TypeError(f"expected a module or a ZeroOptimizer, got {type(target).__name__}")
    if not full:
        shards.load_model(target, state_dict, strict)
        return
    engines = engines_of(target)
    if not (rank0_only and engines and engines[0].world_size > 1):
        _names.load_into(target, given(state_dict), strict)
        return
    engine = engines[0]
    if any(other.options.stage == 3 or _hooks.has_masters(other) for other in engines):
        _load_sharded(target, engine, state_dict, strict)
        return
    _wire.on_rank_0(engine, lambda: _names.load_into(target, given(state_dict), strict))
    unmanaged = [p for p in target.parameters() if _registry.find(p) is None]
    for other in engines:
        other.broadcast_parameters(list(range(other.parameter_count())), 0)
    engine.broadcast([p.detach() for p in unmanaged] + list(target.buffers()), 0)
    _share_extra_state(target, engine, state_dict)


def _load_sharded(
    module: nn.Module, engine: _C.Engine, state_dict: dict[str, Any] | None, strict: bool
) -> None:
    """Rank 0's values, one module's own parameters at a time."""
    names = set(_wire.on_rank_0(engine, lambda: list(_by_plain_name(module, state_dict))))
    wanted = {_names.plain(module, name) for name in module.state_dict(keep_vars=True)}
    missing, unexpected = sorted(wanted - names), sorted(names - wanted)
    if strict and (missing or unexpected):
        raise RuntimeError(
            "error loading the state dict of rank 0 into "
            f"{type(_names.unwrapped(module)).__name__}: missing keys {missing}, unexpected keys "
            f"{unexpected}"
        )
    _wire.on_rank_0(engine, lambda: _check_shapes(module, _by_plain_name(module, state_dict)))
    values = _by_plain_name(module, state_dict) if engine.rank == 0 else {}
    for prefix, part in _names.named_modules(module):
        own: dict[str, torch.Tensor] = {
            key: tensor
            for tensors in (part._parameters, part._buffers)
            for key, tensor in tensors.items()
            if tensor is not None
        }
        chosen = [key for key in own if _names.joined(prefix, key) in names]
        if not chosen:
            continue
        with gathered([own[key] for key in chosen], writeback=True), torch.no_grad():
            if engine.rank == 0:
                for key in chosen:
                    own[key].copy_(values[_names.joined(prefix, key)])
        engine.broadcast([own[k].detach() for k in chosen if _registry.find(own[k]) is None], 0)
        for key in chosen:
            _share_master(own[key], values, _names.joined(prefix, key))
    _share_extra_state(module, engine, state_dict)


def _share_extra_state(
    module: nn.Module, engine: _C.Engine, state_dict: dict[str, Any] | None
) -> None:
    """What modules keep by ``set_extra_state``, which is no tensor of theirs."""
    values = _by_plain_name(module, state_dict) if engine.rank == 0 else {}
    for name, owner in _extra_state.owners(module, "set_extra_state"):
        given_here = [values[name]] if name in values else []
        for value in _wire.on_rank_0(engine, given_here.copy):
            owner.set_extra_state(value)


def _by_plain_name(module: nn.Module, state_dict: dict[str, Any] | None) -> dict[str, Any]:
    return _names.read(module, given(state_dict))


def _share_master(parameter: torch.Tensor, values: dict[str, Any], name: str) -> None:
    """Rank 0's fp32 value of a parameter that computes in 16 bits."""
    found = _registry.find(parameter)
    if found is None:
        return
    engine, index = found
    if engine.has_master(index):
        master = torch.empty_like(parameter, dtype=torch.float32)
        if engine.rank == 0:
            master.copy_(values[name])
        engine.broadcast([master], 0)
        engine.load_master(index, master)


def _check_shapes(module: nn.Module, state_dict: dict[str, Any]) -> None:
    own = _names.to_plain(module, module.state_dict(keep_vars=True))
    for name, value in own.items():
        got = state_dict.get(name)
        if isinstance(value, torch.Tensor) and got is not None and got.shape != value.shape:
            raise RuntimeError(
                f"'{name}': expected shape {tuple(value.shape)}, got {tuple(got.shape)} (what "
                "state_dict gave with full=False is loaded with full=False)"
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
            tensors += [
                torch.empty(v.shape, dtype=v.dtype, device="cpu")
                for v in state.values()
                if _is_slot(v)
            ]
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


def _require_optimizer(optimizer: Any) -> None:
    if not isinstance(optimizer, ZeroOptimizer):
        raise TypeError(f"expected a ZeroOptimizer, got {type(optimizer).__name__}")
