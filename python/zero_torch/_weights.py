"""Loads a model from files of whole tensors that others wrote, each rank what it holds."""

from __future__ import annotations

import os
import re

import torch

from . import _C
from ._tensor_files import PathLike, StoredTensors, open_stored

# Of the pieces in a directory of ours, which is no model without its manifest.
_PIECES = re.compile(r"(parameters|optimizer)-[0-9a-f]{8}-\d+-\d+\.safetensors")

# (name, tensor, whether it is a parameter) of what no engine holds; (name, first name) of ties
Model = tuple[list[tuple[str, torch.Tensor, bool]], list[tuple[str, str]]]


def found_at(path: PathLike) -> bool:
    """Whether there are such files, and not a checkpoint of ``save``."""
    if not os.path.isdir(path):
        return os.path.isfile(path)
    names = os.listdir(path)
    if "manifest.json" in names:
        return False
    return ".metadata" in names or any(
        name.endswith(".safetensors") and not _PIECES.fullmatch(name) for name in names
    )


def has_optimizer(path: PathLike) -> bool:
    """Whether there may be the state of an optimizer too."""
    return os.path.exists(os.path.join(path, ".metadata"))


def load(path: PathLike, engine: _C.Engine | None, model: Model, strict: bool) -> None:
    """Collective. Raises on every rank, before anything is changed, where something doesn't fit."""
    opened: list[StoredTensors] = []

    def shapes() -> dict[str, list[int]]:
        opened.append(open_stored(path, "load"))
        return {name: list(opened[0].shape(name)) for name in opened[0]}

    def read(name: str) -> torch.Tensor:
        return opened[0][name]

    _C.load_weights(os.fspath(path), shapes, read, engine, model, strict)
