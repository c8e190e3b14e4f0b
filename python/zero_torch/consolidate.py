"""Whole weights out of a checkpoint, for programs that know nothing of it."""

from __future__ import annotations

import os

import torch

from . import _C

Path = str | os.PathLike[str]


def consolidate(
    directory: Path,
    file: Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int | None = None,
    tied: bool = True,
    verify: bool = True,
) -> list[str]:
    """Writes the model of a checkpoint that ``save`` wrote into one safetensors file, whole.

    Parameters and buffers under their plain names, for ``safetensors.torch.load_file`` and
    ``load_state_dict(strict=True)``, or Hugging Face's ``from_pretrained``. Not collective: one
    process, without a group, whatever the world size and stage that saved. Takes a block of memory
    beyond what is written, or one tensor where it lay in memory otherwise than row-major.

    - ``dtype``: of every floating tensor, trained, frozen or a buffer. None: as saved, which is
      float32 for parameters with masters.
    - ``max_file_bytes``: bytes of tensors in a file. Where they are more, ``NAME.safetensors``
      becomes ``NAME-00001-of-00003.safetensors`` and so on, with ``NAME.safetensors.index.json``;
      a larger tensor has a file alone.
    - ``tied``: tied tensors under all of their names, as ``load_state_dict(strict=True)`` needs
      them. False: once, as ``safetensors.torch.save_model`` writes and ``load_model`` expects them.
    - ``verify``: checksums are compared while reading.

    Written beside and renamed when all of it is on the disk: a file of that name, its earlier parts
    and its index are replaced only then. Returns the paths that were written, the index last.
    Raises ValueError for files of the checkpoint that are damaged or missing, by name; for a
    ``file`` that does not end in ``.safetensors``, is a directory, or lies in the checkpoint's own;
    RuntimeError for a full disk.
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"expected dtype to be a torch.dtype or None, got {dtype!r}")
    if max_file_bytes is not None and (
        isinstance(max_file_bytes, bool)
        or not isinstance(max_file_bytes, int)
        or max_file_bytes < 1
    ):
        raise ValueError(
            f"expected max_file_bytes to be at least 1, or None, got {max_file_bytes!r}"
        )
    return _C.consolidate(
        os.fspath(directory), os.fspath(file), dtype, max_file_bytes or 0, tied, verify
    )
