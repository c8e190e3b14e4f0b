"""A torch.optim class on shards: it sees one parameter per part that this rank holds."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from . import _C, _wire
from .elementwise import Traits
from .native import Groups, State

_NOT_HYPERPARAMETERS = ("params", "param_names")


class ForeignRule:
    """Steps an engine by an instance of ``cls`` over this rank's parts."""

    def __init__(
        self,
        engine: _C.Engine,
        cls: type[torch.optim.Optimizer],
        hyperparameters: dict[str, Any],
        traits: Traits,
        groups: Groups,
    ) -> None:
        self._engine = engine
        self._traits = traits
        self._cls, self._hyperparameters = cls, hyperparameters
        self._parts: dict[int, nn.Parameter] = {}
        self._group_of: list[int] = []
        self.inner = self._make([self._lend_group(at, group) for at, group in enumerate(groups)])

    def _make(self, groups: Groups) -> torch.optim.Optimizer:
        return self._cls(groups, **self._hyperparameters)

    def step(self, groups: Groups) -> None:
        self._copy_hyperparameters(groups)
        shown = [_scalars(group) for group in groups] if self._engine.joining() else []
        if not self._engine.begin_step(pickle.dumps(shown)):
            return
        try:
            for index in self._engine.stepping():
                shard = self._engine.shard_parameter(index)
                part = self._parts.get(index)
                if part is None:
                    part = self._lend_unfrozen(index, shard)
                if part.data_ptr() != shard.data_ptr():
                    part.data = shard
                part.grad = self._engine.stepping_gradient(index)
            self.inner.step()
        finally:
            for part in self._parts.values():
                part.grad = None
            self._engine.end_step()
        for outer, inner in zip(groups, self.inner.param_groups, strict=True):
            outer.update({key: inner[key] for key in outer if key not in _NOT_HYPERPARAMETERS})
        self._account()

    def follow(self, groups: Groups, hyperparameters: bytes) -> None:
        """A step that other ranks take, with their hyper-parameters.

        ``groups`` keep their own, but for what the class itself changes in them.
        """
        theirs = pickle.loads(hyperparameters)
        stepped = [{**own, **given} for own, given in zip(groups, theirs, strict=True)]
        self.step(stepped)
        for own, given, after in zip(groups, theirs, stepped, strict=True):
            own.update({key: after[key] for key in given if after[key] is not given[key]})

    def add_group(self, group: dict[str, Any]) -> None:
        lent = self._lend_group(len(self.inner.param_groups), group)
        self.inner.add_param_group(lent)
        self._begin_state(lent)

    def states(self, indices: Iterable[int]) -> Iterator[tuple[int, State]]:
        """(index, whole state) of those that have state. Collective at stages 1 and 2."""
        kinds = self._kinds()
        for index in indices:
            if index in kinds:
                yield (
                    index,
                    {key: self._whole(index, key, *kind) for key, kind in kinds[index].items()},
                )

    def check_state(
        self, name: str, shape: tuple[int, ...], state: State, group: dict[str, Any]
    ) -> None:
        """Raises ValueError when what is split like the parameter has not this shape."""
        for key, value in state.items():
            if self._is_split(key, value) and value.shape != shape:
                raise ValueError(
                    f"state of parameter '{name}': expected {key} of shape {shape}, got "
                    f"{tuple(value.shape)}"
                )

    def held_states(self) -> Iterator[tuple[int, State]]:
        """(index, copies of what this rank holds) of the parameters that it has a part of."""
        for index, part in sorted(self._parts.items()):
            state = self.inner.state.get(part, {})
            if state:
                yield index, {key: self._copy(index, key, state[key]) for key in state}

    def _copy(self, index: int, key: str, value: Any) -> Any:
        if self._engine.options.stage == 0 and self._is_split(key, value):
            return self._engine.unshard(index, value)  # into the parameter's shape
        return value.clone() if isinstance(value, torch.Tensor) else value

    def load_states(self, states: Mapping[int, State], groups: Groups) -> None:
        """Replaces all state: what ``states`` lacks is cleared. No communication."""
        parts = {
            index: {name: self._part_of(index, name, value) for name, value in state.items()}
            for index, state in states.items()
        }
        self._load_parts(parts, groups)

    def load_held(self, states: Mapping[int, State], groups: Groups) -> None:
        """The same, of what this rank holds."""
        if self._engine.options.stage == 0:
            self.load_states(states, groups)
            return
        self._load_parts(states, groups)

    def kind(self) -> str:
        """What a checkpoint calls it."""
        return self._cls.__name__

    def shards(self) -> list[tuple[int, str, torch.Tensor]]:
        """(index, name, this rank's part) of state that is split like its parameter."""
        return [
            (index, key, value)
            for index, part in sorted(self._parts.items())
            for key, value in self.inner.state.get(part, {}).items()
            if self._is_split(key, value)
        ]

    def scalars(self) -> dict[str, State]:
        """State that is not split, by parameter name, of all ranks. Collective."""
        return {
            self._engine.parameter(index)[0]: {
                key: value for key, (dtype, value) in kinds.items() if dtype is None
            }
            for index, kinds in sorted(self._kinds().items())
        }

    def check_saved(self, states: dict[str, list[str]], scalars: dict[str, State]) -> None:
        """Anything may be this class's state: it looks at it in its own load_state_dict."""

    def load_saved(
        self,
        checkpoint: _C.Checkpoint,
        states: dict[str, list[str]],
        scalars: dict[str, State],
        groups: Groups,
    ) -> None:
        """Replaces all state by a checkpoint's, of which each rank reads its part."""
        parts: dict[int, State] = {}
        names = [self._engine.parameter(i)[0] for i in range(self._engine.parameter_count())]
        self._engine.make_trainable([i for i, name in enumerate(names) if states.get(name)])
        for index, name in enumerate(names):
            values: State = {
                key: torch.tensor(value, dtype=torch.float32, device="cpu")
                for key, value in scalars.get(name, {}).items()
            }
            for key in states.get(name, []):
                values[key] = checkpoint.read_state(self._engine, index, key)
            if values:
                parts[index] = values
        self._load_parts(parts, groups)

    def _load_parts(self, states: Mapping[int, State], groups: Groups) -> None:
        """``load_states`` of what is this rank's already."""
        self._copy_hyperparameters(groups)
        for index in states:
            shard = self._engine.shard_parameter(index)
            if index not in self._parts and shard.numel() > 0:
                self._lend_unfrozen(index, shard)
        packed = self.inner.state_dict()
        order = {id(part): index for index, part in self._parts.items()}
        loaded = {}
        for inner_group, packed_group in zip(
            self.inner.param_groups, packed["param_groups"], strict=True
        ):
            for part, key in zip(inner_group["params"], packed_group["params"], strict=True):
                index = order[id(part)]
                if index in states:
                    loaded[key] = states[index]
        self.inner.load_state_dict({"state": loaded, "param_groups": packed["param_groups"]})
        self._account()

    def _lend_group(self, at: int, group: dict[str, Any]) -> dict[str, Any]:
        """The group as the inner optimizer sees it: parts that share the engine's memory."""
        parts = []
        for _ in group["params"]:
            index = len(self._group_of)
            self._group_of.append(at)
            shard = self._engine.shard_parameter(index)
            if shard.numel() > 0:
                self._parts[index] = nn.Parameter(shard.detach())
                parts.append(self._parts[index])
        return {**_hyperparameters(group), "params": parts}

    def _lend_unfrozen(self, index: int, shard: torch.Tensor) -> nn.Parameter:
        """The part of a parameter that was frozen when its group was lent."""
        part = self._parts[index] = nn.Parameter(shard.detach())
        group = self.inner.param_groups[self._group_of[index]]
        group["params"].append(part)
        self._begin_state({**_hyperparameters(group), "params": [part]})
        return part

    def _begin_state(self, group: dict[str, Any]) -> None:
        """State that the class makes when it is constructed, of parts that came later."""
        if group["params"]:
            self.inner.state.update(self._make([group]).state)

    def _copy_hyperparameters(self, groups: Groups) -> None:
        for inner, outer in zip(self.inner.param_groups, groups, strict=True):
            inner.update(_hyperparameters(outer))

    def _account(self) -> None:
        tensors = (v for state in self.inner.state.values() for v in state.values())
        self._engine.account_foreign_state(
            sum(v.numel() * v.element_size() for v in tensors if isinstance(v, torch.Tensor))
        )

    def _is_split(self, key: str, value: Any) -> bool:
        return isinstance(value, torch.Tensor) and key not in self._traits.per_parameter

    def _kinds(self) -> dict[int, dict[str, tuple[torch.dtype | None, Any]]]:
        """By index and key: the dtype of what is split, or the value of what is not.

        Ranks without a part of a parameter learn it from those that have one.
        """
        alone = self._engine.options.stage == 0
        own: dict[int, dict[str, tuple[torch.dtype | None, Any]]] = {}
        for index, part in self._parts.items():
            state = self.inner.state.get(part, {})
            if state:
                own[index] = {
                    key: (value.dtype, None)
                    if self._is_split(key, value)
                    else (None, value if alone else _on_cpu(value))
                    for key, value in state.items()
                }
        if alone:
            return own
        merged: dict[int, dict[str, tuple[torch.dtype | None, Any]]] = {}
        for theirs in _wire.exchange(self._engine, own):
            for index, kind in theirs.items():
                merged.setdefault(index, kind)
        return merged

    def _whole(self, index: int, key: str, dtype: torch.dtype | None, value: Any) -> Any:
        if dtype is None:
            return value.clone() if isinstance(value, torch.Tensor) else value
        part = self._parts.get(index)
        if part is None:
            own = torch.empty(0, dtype=dtype, device=self._engine.device)
        else:
            own = self.inner.state[part][key]
        return self._engine.unshard(index, own)

    def _part_of(self, index: int, key: str, value: Any) -> Any:
        if self._is_split(key, value):
            return self._engine.shard(index, value)
        return value.clone() if isinstance(value, torch.Tensor) else value


def _scalars(group: dict[str, Any]) -> dict[str, Any]:
    """The hyper-parameters that are plain values, or tensors of one element (a learning rate)."""
    return {
        key: _on_cpu(value)
        for key, value in _hyperparameters(group).items()
        if isinstance(value, bool | int | float | str | tuple | list | torch.Tensor | None)
    }


def _on_cpu(value: Any) -> Any:
    """A copy for other ranks, where a tensor would come to the device that it was on here."""
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value


def _hyperparameters(group: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in _NOT_HYPERPARAMETERS}
