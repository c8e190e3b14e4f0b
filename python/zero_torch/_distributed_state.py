"""Optimizer state of a directory of torch.distributed.checkpoint, a parameter at a time."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import packing
from ._tensor_files import DistributedFiles, PathLike
from .optimizer import ZeroOptimizer


class SavedOptimizer:
    """Checks that the optimizer's part of a directory fits an optimizer, then loads it.

    It is what ``torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`` gives, with
    parameters by name, or a plain ``state_dict()``, with parameters by position. ValueError where
    it does not fit.
    """

    def __init__(self, directory: PathLike, opt: ZeroOptimizer) -> None:
        self._opt = opt
        files = DistributedFiles(directory)
        values: dict[str, dict[str, str]] = defaultdict(dict)  # of the state of a parameter
        settings: dict[int, dict[str, str]] = defaultdict(dict)  # of a group
        for key, path in files.paths.items():
            if len(path) < 3 or path[0] == "model":
                continue
            part, owner, name = path[-3:]
            if part == "state":
                values[str(owner)][name] = key
            elif part == "param_groups":
                settings[int(owner)][name] = key
        if not settings:
            raise ValueError(
                f"expected the state dict of an optimizer in '{os.fspath(directory)}', got none; "
                "leave opt out to load the model alone"
            )
        groups = [
            {name: files.read(key) for name, key in settings[at].items()} for at in sorted(settings)
        ]
        self._check_names(groups, directory)
        described = {
            parameter: {name: files.like(key) for name, key in values[str(parameter)].items()}
            for group in groups
            for parameter in group["params"]
        }
        self._unpacked = packing.unpack(opt, {"state": described, "param_groups": groups})
        found = self._unpacked.states
        packing.check(
            opt, self._unpacked, {i: tuple(opt._live.parameter(i)[1].shape) for i in found}
        )
        parameters = [parameter for group in groups for parameter in group["params"]]

        def read(index: int) -> dict[str, Any]:
            keys = values[str(parameters[index])]
            return {name: files.read(keys[name]) for name in found[index]}

        self._unpacked.states = _States(list(found), read)

    def _check_names(self, groups: list[dict[str, Any]], directory: PathLike) -> None:
        engine = self._opt._live
        names = {id(p): n for n, p, _ in map(engine.parameter, range(engine.parameter_count()))}
        mine = [[names[id(p)] for p in group["params"]] for group in self._opt.param_groups]
        theirs = [list(group["params"]) for group in groups]
        if any(isinstance(name, str) for group in theirs for name in group) and mine != theirs:
            raise ValueError(
                f"expected the param groups in '{os.fspath(directory)}' to hold the parameters "
                f"that they have in this optimizer, {mine}, got {theirs}"
            )

    def load(self) -> None:
        """No communication."""
        self._opt._live.make_trainable(sorted(self._unpacked.states))
        packing.load(self._opt, self._unpacked, self._opt._rule.load_states)


class _States(Mapping[int, dict[str, Any]]):
    """State by the index of its parameter, read whenever it is looked up."""

    def __init__(self, indices: list[int], read: Callable[[int], dict[str, Any]]) -> None:
        self._indices, self._read = dict.fromkeys(indices), read

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index not in self._indices:
            raise KeyError(index)
        return self._read(index)

    def __contains__(self, index: object) -> bool:
        return index in self._indices

    def __iter__(self) -> Iterator[int]:
        return iter(self._indices)

    def __len__(self) -> int:
        return len(self._indices)
