"""The rules that C++ runs itself: which hyper-parameters they take, and their state by index."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from . import _C

State = dict[str, Any]
Groups = list[dict[str, Any]]
CppRule = _C.AdamW | _C.Adam | _C.SGD | _C.Lion

_TORCH = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}
_ADAM = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
HYPERPARAMETERS = {
    "adamw": _ADAM,
    "adam": _ADAM,
    "sgd": ("lr", "momentum", "dampening", "weight_decay", "nesterov", "maximize"),
    "lion": ("lr", "betas", "weight_decay", "maximize"),
}
_STATE = {
    "adamw": ("step", "exp_avg", "exp_avg_sq"),
    "adam": ("step", "exp_avg", "exp_avg_sq"),
    "sgd": ("momentum_buffer",),
    "lion": ("exp_avg",),
}
_MAXIMUM = "max_exp_avg_sq"  # of Adam and AdamW with amsgrad
_UNSUPPORTED = "differentiable"


def defaults(name: str, given: dict[str, Any], settings: Iterable[str]) -> dict[str, Any]:
    """Every key that torch's optimizer has in its groups, with ``given`` put over its defaults.

    Raises TypeError for an unknown hyper-parameter (``settings`` are the other keywords that are
    allowed) and NotImplementedError for one of torch's that the native rule doesn't have.
    """
    result = _torch_defaults(name)
    for key, value in given.items():
        if key in HYPERPARAMETERS[name]:
            result[key] = value
        elif key not in result:
            raise TypeError(
                f"unexpected keyword argument '{key}'; optimizer='{name}' takes "
                f"{', '.join(HYPERPARAMETERS[name])}, and the settings are {', '.join(settings)}"
            )
        elif value != result[key]:
            raise NotImplementedError(
                f"{key}={value!r} is not supported by the native '{name}' rule; leave it at "
                f"{result[key]!r}, or pass the class torch.optim.{_TORCH[name].__name__}"
            )
    return result


def _torch_defaults(name: str) -> dict[str, Any]:
    """The ``defaults`` of torch's optimizer, without making one (which imports torch._dynamo)."""
    if name not in _TORCH:
        rule = _C.Lion()
        return {
            "lr": rule.lr,
            "betas": tuple(rule.betas),
            "weight_decay": rule.weight_decay,
            "maximize": rule.maximize,
        }
    arguments = inspect.signature(_TORCH[name]).parameters.values()
    result = {a.name: a.default for a in arguments if a.default is not a.empty}
    if name != "sgd":
        result["decoupled_weight_decay"] = name == "adamw"
    return result


def check_group(name: str, group: dict[str, Any]) -> None:
    """Raises ValueError, TypeError or NotImplementedError for hyper-parameters of one group."""
    _C.validate_rule(_rule(name, group))


class NativeRule:
    """Steps an engine by ``"adamw"``, ``"adam"``, ``"sgd"`` or ``"lion"``."""

    def __init__(self, engine: _C.Engine, name: str) -> None:
        self._engine = engine
        self._name = name

    def step(self, groups: Groups) -> None:
        self._engine.step(self.rules(groups))

    def rules(self, groups: Groups) -> list[CppRule]:
        """The hyper-parameters of ``groups`` as they are now."""
        return [_rule(self._name, group) for group in groups]

    def add_group(self, group: dict[str, Any]) -> None:
        """Nothing to prepare: the engine makes state when a group steps first."""

    def states(self, indices: Iterable[int]) -> Iterator[tuple[int, State]]:
        """(index, whole state) of those that have state. Collective at stages 1 and 2."""
        for index in indices:
            if state := self._state(index):
                yield index, state
            del state  # before the next one is made

    def held_states(self) -> Iterator[tuple[int, State]]:
        """(index, copies of what this rank holds) of those that have state."""
        for index, state in sorted(_C.held_state(self._engine).items()):
            yield index, {key: value.clone() for key, value in self._ordered(state).items()}

    def _state(self, index: int) -> State:
        return self._ordered(self._engine.full_state(index))

    def _ordered(self, state: State) -> State:
        return {key: state[key] for key in (*_STATE[self._name], _MAXIMUM) if key in state}

    def check_state(
        self, name: str, shape: tuple[int, ...], state: State, group: dict[str, Any]
    ) -> None:
        """Raises ValueError when ``state`` is not this rule's, of tensors of this shape."""
        needed, allowed = _STATE[self._name], {*_STATE[self._name], "step"}
        if "amsgrad" in group:
            allowed.add(_MAXIMUM)  # it stays when amsgrad is switched off
        if group.get("amsgrad"):
            needed = (*needed, _MAXIMUM)
        if set(state) - allowed or any(key not in state for key in needed):
            amsgrad = " with amsgrad" if group.get("amsgrad") else ""
            raise ValueError(
                f"state of parameter '{name}': expected {', '.join(needed)} for "
                f"optimizer='{self._name}'{amsgrad}, got {', '.join(map(str, state)) or 'nothing'}"
            )
        for key, value in state.items():
            if key != "step" and value.shape != shape:
                raise ValueError(
                    f"state of parameter '{name}': expected {key} of shape {shape}, got "
                    f"{tuple(value.shape)}"
                )

    def kind(self) -> str:
        """What a checkpoint calls it."""
        return self._name

    def shards(self) -> list[tuple[int, str, torch.Tensor]]:
        """(index, name, this rank's part) of state that lies outside the engine: none."""
        return []

    def scalars(self) -> dict[str, State]:
        """State that is not split, by parameter name."""
        counts = {
            self._engine.parameter(index)[0]: self._engine.step_count(index)
            for index in range(self._engine.parameter_count())
        }
        return {name: {"step": count} for name, count in counts.items() if count > 0}

    def check_saved(self, states: dict[str, list[str]], scalars: dict[str, State]) -> None:
        """Raises ValueError for names of state tensors, by parameter, that are another rule's."""
        allowed = rule_names(self._name)
        for name, found in states.items():
            if set(found) - allowed:
                raise ValueError(
                    f"state of parameter '{name}': expected {', '.join(sorted(allowed))} for "
                    f"optimizer='{self._name}', got {', '.join(found)}"
                )

    def load_saved(
        self,
        checkpoint: _C.Checkpoint,
        states: dict[str, list[str]],
        scalars: dict[str, State],
        groups: Groups,
    ) -> None:
        """Replaces all state by a checkpoint's. Collective."""
        steps = {name: 1 for name, found in states.items() if found}  # torch's SGD counts none
        steps |= {name: int(state["step"]) for name, state in scalars.items() if "step" in state}
        checkpoint.load_native_state(self._engine, steps, False)

    def load_states(self, states: Mapping[int, State], groups: Groups) -> None:
        """Replaces all state: what ``states`` lacks is cleared. No communication."""
        for index in range(self._engine.parameter_count()):
            state = states.get(index, {})
            self._engine.load_full_state(
                index, {key: torch.as_tensor(value) for key, value in state.items()}
            )

    def load_held(self, states: Mapping[int, State], groups: Groups) -> None:
        """The same, of what this rank holds."""
        for index in range(self._engine.parameter_count()):
            state = states.get(index, {})
            _C.load_held_state(
                self._engine, index, {key: torch.as_tensor(value) for key, value in state.items()}
            )


# ---- checkpoints


def rule_names(name: str) -> set[str]:
    """Names of the state tensors that a native rule may have."""
    return {*_STATE[name], _MAXIMUM} - {"step"}


def _rule(name: str, group: dict[str, Any]) -> CppRule:
    if group.get(_UNSUPPORTED):
        raise NotImplementedError(
            f"{_UNSUPPORTED}={group[_UNSUPPORTED]!r} in a param group is not supported by the "
            f"native '{name}' rule; leave it out"
        )
    lr, weight_decay = _real("lr", group["lr"]), _real("weight_decay", group["weight_decay"])
    maximize = bool(group.get("maximize", False))
    if name == "sgd":
        return _C.SGD(
            lr=lr,
            momentum=_real("momentum", group["momentum"]),
            dampening=_real("dampening", group["dampening"]),
            weight_decay=weight_decay,
            nesterov=bool(group["nesterov"]),
            maximize=maximize,
        )
    if name == "lion":
        return _C.Lion(
            lr=lr, betas=_betas(group["betas"]), weight_decay=weight_decay, maximize=maximize
        )
    # As in torch, an Adam whose group says so decouples its weight decay.
    kind = _C.AdamW if group.get("decoupled_weight_decay", name == "adamw") else _C.Adam
    return kind(
        lr=lr,
        betas=_betas(group["betas"]),
        eps=_real("eps", group["eps"]),
        weight_decay=weight_decay,
        amsgrad=bool(group.get("amsgrad", False)),
        maximize=maximize,
    )


def _real(name: str, value: Any) -> float:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number or a tensor of one element, got {value!r}")
    return float(value)


def _betas(value: Any) -> tuple[float, float]:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise TypeError(f"expected betas to be two numbers, got {value!r}")
    return _real("betas[0]", value[0]), _real("betas[1]", value[1])
