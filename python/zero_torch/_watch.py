"""Notices when a module's parameters are no longer the ones that an engine manages.

Engines see values that moved (``p.data = x``); a Parameter object that was replaced or added
(``load_state_dict(assign=True)``, LoRA) only the module knows. Everything is held weakly: neither
the module nor the engine lives longer for being watched.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from . import _C, _names
from ._parameters import parameters_of_batch_norms

Slot = tuple[dict[str, Any], str, torch.Tensor, str]  # a module's dict, key, parameter, full name


class ModuleWatch:
    """The parameters of one module as they were when it was sharded.

    ``check()`` puts a managed parameter back where a new one with the same shape took its place
    (with the new one's values), and raises RuntimeError by name for what it can't mend.
    """

    def __init__(self, module: nn.Module, engine: _C.Engine, ignored: list[str]) -> None:
        self._module = weakref.ref(module)
        self._engine = weakref.ref(engine)
        self._ignored = {
            id(parameter)
            for name, parameter in _names.named_parameters(module)
            if name in set(ignored)
        }
        self._slots: list[Slot] = []
        self._counts: list[tuple[weakref.ref[nn.Module], int, int]] = []
        self._record(module)
        hook = _StateDictHook(weakref.ref(self))
        inner = _names.unwrapped(module)  # its own state dicts too
        handles = [
            inner.register_state_dict_pre_hook(hook.before_state_dict),
            inner.register_load_state_dict_post_hook(hook.after_load_state_dict),
        ]
        self._unhook = weakref.finalize(self, _remove, handles)
        self._unhook.atexit = False

    def close(self) -> None:
        """Takes its hooks off the module, which is watched no longer."""
        self._unhook()

    def names(self) -> dict[int, str]:
        """Current names of the module's parameters, by id."""
        module = self._module()
        return (
            {} if module is None else {id(p): name for name, p in _names.named_parameters(module)}
        )

    def keeps_dtype(self) -> set[int]:
        """Ids of parameters that mixed precision leaves alone."""
        return parameters_of_batch_norms(self._module())

    def check(self) -> None:
        # Plain loops: this runs at every step.
        for slots, key, parameter, _ in self._slots:
            if slots.get(key) is not parameter:
                self._mend()
                break
        for reference, parameters, modules in self._counts:
            module = reference()
            if module is not None and (
                len(module._parameters) != parameters or len(module._modules) != modules
            ):
                self.refresh()
                break

    def refresh(self) -> None:
        """Looks at the module anew; raises when it has parameters that nobody manages."""
        module, engine = self._module(), self._engine()
        if module is None or engine is None:
            return
        for name, parameter in _names.named_parameters(module):
            known = id(parameter) in self._ignored or not parameter.requires_grad
            if not known and engine.index_of(parameter) < 0:
                raise RuntimeError(
                    f"parameter '{name}' was added after the model was sharded: it would be "
                    "neither reduced nor stepped; pass it to optimizer.add_param_group(), or "
                    "freeze it"
                )
        self._record(module)

    def wait(self) -> None:
        engine = self._engine()
        if engine is not None:
            engine.wait_parameters()

    def _record(self, module: nn.Module) -> None:
        self._slots, self._counts = [], []
        for prefix, child in _names.named_modules(module):
            self._counts.append((weakref.ref(child), len(child._parameters), len(child._modules)))
            for key, parameter in child._parameters.items():
                if parameter is not None and id(parameter) not in self._ignored:
                    name = _names.joined(prefix, key)
                    self._slots.append((child._parameters, key, parameter, name))

    def _mend(self) -> None:
        engine, module = self._engine(), self._module()
        if engine is None or module is None:
            return
        for slots, key, parameter, name in self._slots:
            current = slots.get(key)
            if current is None or current is parameter or engine.index_of(current) >= 0:
                continue
            if engine.index_of(parameter) < 0:
                continue  # frozen and never managed
            _put_back(engine, slots, key, parameter, name)
        self.refresh()


class _StateDictHook:
    """Hooks on the user's module; a copy or a pickle of the module gets hooks that do nothing."""

    def __init__(self, watch: weakref.ref[ModuleWatch] | None = None) -> None:
        self._watch = watch

    def __reduce__(self) -> tuple[type[_StateDictHook], tuple[()]]:
        return _StateDictHook, ()

    def before_state_dict(self, module: nn.Module, prefix: str, keep_vars: bool) -> None:
        watch = self._watch() if self._watch is not None else None
        if watch is not None:
            watch.wait()

    def after_load_state_dict(self, module: nn.Module, incompatible_keys: Any) -> None:
        watch = self._watch() if self._watch is not None else None
        if watch is not None:
            watch.check()


def _remove(handles: list[Any]) -> None:
    for handle in handles:
        handle.remove()


def _put_back(
    engine: _C.Engine, slots: dict[str, Any], key: str, parameter: torch.Tensor, name: str
) -> None:
    new = slots[key]
    if new.shape != parameter.shape or new.dtype != parameter.dtype:
        raise RuntimeError(
            f"parameter '{name}' was replaced by one of shape {tuple(new.shape)} and {new.dtype}; "
            f"it is managed with shape {tuple(parameter.shape)} and {parameter.dtype}: make a new "
            "ZeroOptimizer after changing the model"
        )
    if new.grad is not None:
        raise RuntimeError(
            f"parameter '{name}' was replaced and the new one has a gradient that was never "
            "reduced; replace parameters before forward, or copy into them instead"
        )
    index = engine.index_of(parameter)
    engine.begin_load(index)
    try:
        with torch.no_grad():
            parameter.copy_(new)
    finally:
        engine.end_load(index)
    slots[key] = parameter
