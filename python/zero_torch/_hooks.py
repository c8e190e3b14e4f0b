"""What is installed on a user's modules, and how to take it off again.

Stage 3: forward hooks call straight into C++. State dicts hold whole values: each module's own
parameters are made whole (or written to) one after the other. The modules own the engine through
the hooks. At every stage: state dicts hold fp32 masters, where there are any.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from . import _C, _wire
from ._autocast import CastPacking
from ._units import Found

_keep_whole = True
_held: dict[_C.Engine, dict[int, torch.Tensor]] | None = None


@contextlib.contextmanager
def dropping_values() -> Iterator[None]:
    """Inside, state dicts take part in gathering values, and drop them."""
    global _keep_whole
    _keep_whole = False
    try:
        yield
    finally:
        _keep_whole = True


@contextlib.contextmanager
def giving_shards(held: dict[_C.Engine, dict[int, torch.Tensor]]) -> Iterator[None]:
    """Inside, state dicts have copies of these, by index, and communicate nothing."""
    global _held
    _held = held
    try:
        yield
    finally:
        _held = None


def attach(engine: _C.Engine, module: nn.Module, found: Found, handles: list[Any]) -> None:
    """Hooks on the module's units (stage 3) and on all its modules that hold managed parameters.

    ``handles`` are of hooks that are installed already, to be taken off with these.
    """
    if engine.options.stage == 3:
        handles += _attach_units(engine, module, found)
    _attached[engine] = _Attached(weakref.ref(module), handles)
    extend(engine)


def _attach_units(engine: _C.Engine, module: nn.Module, found: Found) -> list[Any]:
    handles: list[Any] = []
    casts = CastHooks(engine)
    for part, unit in found.modules:
        enter, leave = _C.UnitHook(engine, unit, True), _C.UnitHook(engine, unit, False)
        handles.append(part.register_forward_pre_hook(enter, prepend=True))
        handles.append(part.register_forward_hook(leave, always_call=True))
        if part is module:
            handles.append(part.register_forward_pre_hook(casts.enter, prepend=True))
            handles.append(part.register_forward_hook(casts.leave, always_call=True))
    return handles


def extend(engine: _C.Engine) -> None:
    """Hooks on the state dicts of modules that hold managed parameters by now."""
    attached = _attached.get(engine)
    module = None if attached is None else attached.module()
    if attached is None or module is None:
        return
    state = StateHooks(weakref.ref(engine))
    for part in module.modules():
        if part not in attached.with_state and _has_other_values(engine, part):
            attached.with_state.add(part)
            attached.handles += [
                part._register_state_dict_hook(state.make_whole),
                part.register_load_state_dict_pre_hook(state.before_load),
                part.register_load_state_dict_post_hook(state.after_load),
            ]


def detach(engine: _C.Engine) -> None:
    """Takes the hooks off again."""
    attached = _attached.pop(engine, None)
    for handle in [] if attached is None else attached.handles:
        handle.remove()


@dataclass
class _Attached:
    module: weakref.ref[nn.Module]
    handles: list[Any]
    with_state: weakref.WeakSet[nn.Module] = field(default_factory=weakref.WeakSet)


_attached: weakref.WeakKeyDictionary[_C.Engine, _Attached] = weakref.WeakKeyDictionary()


class CastHooks:
    """Around the root's forward: autograd keeps parameters instead of casts of them."""

    def __init__(self, engine: _C.Engine) -> None:
        self._engine = engine  # for as long as the module lives, also where only Python knows it
        reference = weakref.ref(engine)
        self._packing = CastPacking(lambda tensor: _manages(reference, tensor))

    def __deepcopy__(self, memo: dict[int, Any]) -> CastHooks:
        return self

    def enter(self, module: nn.Module, args: Any) -> None:
        self._packing.enter()

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._packing.exit()


class StateHooks:
    """State dicts of modules whose parameters are sharded; on a copy of one, they do nothing."""

    def __init__(self, engine: Callable[[], _C.Engine | None]) -> None:
        self._engine = engine
        self._loading: weakref.WeakKeyDictionary[nn.Module, dict[int, Any]] = (
            weakref.WeakKeyDictionary()
        )
        # The state dict that is being filled, and where each parameter is in it.
        self._filling: Callable[[], Any] = _nothing
        self._names: dict[int, str] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return StateHooks, (_nothing,)

    def _own(self, module: nn.Module) -> Iterator[tuple[str, torch.Tensor, int]]:
        engine = self._engine()
        for key, parameter in module._parameters.items():
            if engine is not None and parameter is not None:
                index = engine.index_of(parameter)
                if index >= 0:
                    yield key, parameter, index

    def make_whole(self, module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        engine = self._engine()
        if self._filling() is not state:
            self._filling, self._names = weakref.ref(state), {}
        for key, parameter, index in self._own(module):
            if engine is not None and engine.options.stage < 3 and not engine.has_master(index):
                continue
            name = prefix + key
            if engine is None or state.get(name) is None or state[name] is parameter:
                continue  # dropped by the user's own hook, or asked for with keep_vars=True
            tied = self._names.setdefault(index, name)
            if tied != name and tied in state:
                state[name] = state[tied]
            elif _held is not None:
                state[name] = _held[engine][index].clone()
            else:
                with _wire.collective("state_dict"):
                    state[name] = _whole(engine, index)

    def before_load(self, module: nn.Module, state: Any, prefix: str, *_: Any) -> None:
        self._end_load(module)  # of one that failed half way
        engine = self._engine()
        if engine is not None:
            self._loading[module] = {
                index: state.get(prefix + key) for key, _parameter, index in self._own(module)
            }
            for index in self._loading[module]:
                engine.begin_load(index)

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        self._end_load(module, loaded=True)

    def _end_load(self, module: nn.Module, loaded: bool = False) -> None:
        # By now the module may hold other parameters: load_state_dict(assign=True).
        engine = self._engine()
        for index, value in self._loading.pop(module, {}).items():
            if engine is not None:
                engine.end_load(index)
                if loaded and isinstance(value, torch.Tensor) and engine.has_master(index):
                    engine.load_master(index, value.detach())


def _whole(engine: _C.Engine, index: int) -> torch.Tensor | None:
    if _keep_whole:
        return engine.full_parameter(index)
    engine.join_full_parameter(index)
    return None


def _nothing() -> None:
    return None


def gathers_state(engine: _C.Engine) -> bool:
    """Whether state dicts of its model are made of shards."""
    return engine.options.stage == 3 or (engine.options.stage > 0 and has_masters(engine))


def has_masters(engine: _C.Engine) -> bool:
    return any(map(engine.has_master, range(engine.parameter_count())))


def _has_other_values(engine: _C.Engine, module: nn.Module) -> bool:
    """Whether a state dict has other values than the parameters' own memory holds."""
    found = [engine.index_of(p) for p in module.parameters(recurse=False)]
    managed = [index for index in found if index >= 0]
    return bool(managed) and (engine.options.stage == 3 or any(map(engine.has_master, managed)))


def _manages(engine: weakref.ref[_C.Engine], tensor: torch.Tensor) -> bool:
    alive = engine()
    return alive is not None and alive.index_of(tensor) >= 0
