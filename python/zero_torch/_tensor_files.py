"""Tensors in files that others wrote, as mappings that read them one by one."""

from __future__ import annotations

import json
import os
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PathLike = str | os.PathLike[str]

_INDEX = ".safetensors.index.json"


class StoredTensors(Mapping[str, torch.Tensor]):
    """Names to CPU tensors; each lookup reads that tensor."""

    def __init__(self) -> None:
        self._place_of: dict[str, Any] = {}  # by name, whatever reads it

    @abstractmethod
    def shape(self, name: str) -> torch.Size:
        """Without reading the tensor."""

    def __contains__(self, name: object) -> bool:
        return name in self._place_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._place_of)

    def __len__(self) -> int:
        return len(self._place_of)


class TensorFiles(StoredTensors):
    """Of a safetensors file, of several, of Hugging Face's ``*.safetensors.index.json``, or of a
    folder: what its index names, or without one all ``*.safetensors``.

    Opening reads headers only. ImportError without safetensors, FileNotFoundError, or ValueError
    for what is no such file or for a name that is in two of them. ``what`` begins the errors.
    """

    def __init__(self, paths: PathLike | Sequence[PathLike], what: str) -> None:
        super().__init__()
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                f"{what}: expected the package safetensors, which reads these files, got none; "
                "run `pip install safetensors`, or pass a state dict"
            ) from error
        path_of: dict[str, Path] = {}
        for path in _files(paths, what):
            try:
                file: Any = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:
                raise ValueError(
                    f"{what}: expected '{path}' to be a safetensors file, or alone one of "
                    f"torch.save() in its zip format, got: {error}"
                ) from error
            for name in file.keys():  # noqa: SIM118 it is no mapping
                if name in path_of:
                    raise ValueError(
                        f"{what}: expected each name once, got '{name}' in '{path_of[name]}' "
                        f"and '{path}'; pass the files of one checkpoint"
                    )
                path_of[name] = path
                self._place_of[name] = file

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._place_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self._place_of[name].get_slice(name).get_shape())


class TorchFile(StoredTensors):
    """Of a file of ``torch.save``: a state dict, or a dict with one under "model" or "state_dict".

    Mapped into memory and unpickled as weights only. ValueError for anything else.
    """

    def __init__(self, path: PathLike) -> None:
        super().__init__()
        try:
            saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"expected '{os.fspath(path)}' to be a state dict that torch.save() wrote, got: "
                f"{error}"
            ) from error
        for key in ("model", "state_dict"):
            if isinstance(saved, Mapping) and isinstance(saved.get(key), Mapping):
                saved = saved[key]
        if not isinstance(saved, Mapping):
            raise ValueError(
                f"expected a state dict in '{os.fspath(path)}', got {type(saved).__name__}"
            )
        for name, value in saved.items():
            if not isinstance(value, torch.Tensor) or not isinstance(name, str):
                raise ValueError(
                    f"expected tensors by name in '{os.fspath(path)}', got {type(value).__name__} "
                    f"for {name!r}"
                )
        self._place_of = dict(saved)

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._place_of[name]
        return tensor

    def shape(self, name: str) -> torch.Size:
        return self[name].shape


class DistributedFiles(StoredTensors):
    """Of a directory of ``torch.distributed.checkpoint``, on any number of ranks.

    Of a nested state dict, what is below a first or second key "model". torch's own reader reads
    it, in this process alone; it unpickles the directory's ``.metadata``.
    """

    def __init__(self, directory: PathLike) -> None:
        super().__init__()
        from torch.distributed.checkpoint.filesystem import FileSystemReader
        from torch.distributed.checkpoint.metadata import TensorStorageMetadata

        self._reader = FileSystemReader(os.fspath(directory))
        try:
            self._metadata = self._reader.read_metadata()
        except Exception as error:
            raise ValueError(
                f"expected '{os.fspath(directory)}' to hold a checkpoint of "
                f"torch.distributed.checkpoint, got: {error}"
            ) from error
        self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
        stored = self._metadata.state_dict_metadata
        places = self._metadata.planner_data or {}
        # The keys on the way to each value of the state dict, by the key in the files.
        self.paths: dict[str, tuple[Any, ...]] = {
            key: tuple(places.get(key, (key,))) for key in stored
        }
        names = {key: _below_model(path) for key, path in self.paths.items()}
        nested = any(names.values())
        for key, entry in stored.items():
            if isinstance(entry, TensorStorageMetadata) and (names[key] or not nested):
                self._place_of[names[key] or key] = key

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self.read(self._place_of[name])
        return tensor

    def shape(self, name: str) -> torch.Size:
        return torch.Size(self.like(self._place_of[name]).shape)

    def like(self, key: str) -> Any:
        """A meta tensor for a tensor; else the value, read."""
        entry: Any = self._metadata.state_dict_metadata[key]
        if not hasattr(entry, "size"):
            return self.read(key)
        return torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")

    def read(self, key: str) -> Any:
        """The value of a key in the files."""
        from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

        entry: Any = self._metadata.state_dict_metadata[key]
        value = None
        if hasattr(entry, "size"):
            value = torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        values = {key: value}
        planner = DefaultLoadPlanner()
        planner.set_up_planner(values, self._metadata, is_coordinator=True)
        plan = self._reader.prepare_local_plan(planner.create_local_plan())
        self._reader.read_data(plan, planner).wait()
        return values[key]


def open_stored(paths: PathLike | Sequence[PathLike], what: str) -> StoredTensors:
    """Whichever of these there is at a path, or in several safetensors files."""
    if isinstance(paths, str | os.PathLike):
        if os.path.exists(os.path.join(paths, ".metadata")):
            return DistributedFiles(paths)
        if os.path.isfile(paths):
            with open(paths, "rb") as file:
                if file.read(4) == b"PK\x03\x04":  # torch writes zip archives
                    return TorchFile(paths)
    return TensorFiles(paths, what)


def _below_model(path: tuple[Any, ...]) -> str:
    """``blocks.0.weight`` of the path of keys ``("model", "blocks.0.weight")``."""
    for at, key in enumerate(path[:-1]):
        if key == "model" and at < 2:
            return ".".join(map(str, path[at + 1 :]))
    return ""


def _files(paths: PathLike | Sequence[PathLike], what: str) -> Iterator[Path]:
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"{what}: expected a file or a folder, got none at '{path}'")
        indices = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
        if path.name.endswith(_INDEX) or len(indices) == 1:
            yield from _indexed(indices[0] if indices else path, what)
            continue
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.safetensors"))
        if not inside:
            raise ValueError(f"{what}: expected *.safetensors files in '{path}', got none")
        yield from inside


def _indexed(index: Path, what: str) -> Iterator[Path]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        files = [index.parent / name for name in names]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{what}: expected a weight_map in '{index}', got: {error!r}") from error
    for file in files:
        if file.parent != index.parent or not file.is_file():
            raise ValueError(
                f"{what}: expected the file '{file}' that '{index.name}' names, beside it, got none"
            )
    yield from files
