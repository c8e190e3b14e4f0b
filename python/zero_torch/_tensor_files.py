"""Tensors in safetensors files, as a mapping that reads them one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

PathLike = str | os.PathLike[str]


class TensorFiles(Mapping[str, torch.Tensor]):
    """Names to CPU tensors of one file, of several, or of all ``*.safetensors`` in a folder.

    Opening reads headers only; each lookup reads that tensor. ImportError without safetensors,
    FileNotFoundError, or ValueError for what is no such file or for a name that is in two of them.
    """

    def __init__(self, paths: PathLike | Sequence[PathLike]) -> None:
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise ImportError(
                "init_from: expected the package safetensors, which reads these files, got none; "
                "run `pip install safetensors`, or pass a state dict"
            ) from error
        self._file_of: dict[str, Any] = {}
        path_of: dict[str, Path] = {}
        for path in _files(paths):
            try:
                file: Any = safe_open(str(path), framework="pt", device="cpu")
            except Exception as error:
                raise ValueError(
                    f"init_from: expected '{path}' to be a safetensors file, got: {error}; "
                    "of what torch.save() wrote, pass torch.load(path, mmap=True)"
                ) from error
            for name in file.keys():  # noqa: SIM118 it is no mapping
                if name in path_of:
                    raise ValueError(
                        f"init_from: expected each name once, got '{name}' in '{path_of[name]}' "
                        f"and '{path}'; pass the files of one checkpoint"
                    )
                path_of[name] = path
                self._file_of[name] = file

    def __getitem__(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._file_of[name].get_tensor(name)
        return tensor

    def shape(self, name: str) -> torch.Size:
        """From the header."""
        return torch.Size(self._file_of[name].get_slice(name).get_shape())

    def __contains__(self, name: object) -> bool:
        return name in self._file_of

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _files(paths: PathLike | Sequence[PathLike]) -> Iterator[Path]:
    if isinstance(paths, str | os.PathLike):
        paths = [paths]
    for path in map(Path, paths):
        if not path.exists():
            raise FileNotFoundError(f"init_from: expected a file or a folder, got none at '{path}'")
        if not path.is_dir():
            yield path
            continue
        inside = sorted(path.glob("*.safetensors"))
        if not inside:
            raise ValueError(f"init_from: expected *.safetensors files in '{path}', got none")
        yield from inside
