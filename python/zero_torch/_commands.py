"""The commands ``consolidate`` and ``inspect``."""

from __future__ import annotations

import argparse
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from . import _C
from .consolidate import consolidate

_UNITS: dict[str, int] = {"": 1, "B": 1}
_UNITS |= {f"{p}B": int(1000**n) for n, p in enumerate("KMGT", 1)}
_UNITS |= {f"{p}IB": int(1024**n) for n, p in enumerate("KMGT", 1)}


def add_to(commands: Any) -> None:
    """Subcommands of an argparse parser; ``run`` is the default of what they do."""
    parser = commands.add_parser(
        "consolidate",
        help="put a checkpoint's weights together in a safetensors file",
        description="Writes the whole weights of a checkpoint into a safetensors file.",
    )
    parser.add_argument("directory", metavar="DIR", help="a checkpoint of zero_torch.save")
    parser.add_argument("file", metavar="FILE", help="NAME.safetensors, outside of DIR")
    parser.add_argument(
        "--dtype",
        type=_dtype,
        help="of every floating tensor, such as bfloat16; otherwise as saved (fp32 masters)",
    )
    parser.add_argument(
        "--max-file-size",
        type=_bytes,
        metavar="SIZE",
        help="such as 5GB or 500MiB: more goes into several files with an index",
    )
    parser.add_argument(
        "--tied-once",
        action="store_true",
        help="write tied tensors under their first name only, as safetensors' save_model",
    )
    parser.add_argument("--no-verify", action="store_true", help="compare no checksums")
    parser.set_defaults(run=_consolidate)

    parser = commands.add_parser(
        "inspect",
        help="print what a checkpoint holds, and verify it",
        description="Prints what a checkpoint holds. The exit status is 1 where it is damaged.",
    )
    parser.add_argument("directory", metavar="DIR", help="a checkpoint of zero_torch.save")
    parser.add_argument("--no-verify", action="store_true", help="do not read the data files")
    parser.set_defaults(run=_inspect)


def _consolidate(options: argparse.Namespace) -> int:
    paths = consolidate(
        options.directory,
        options.file,
        dtype=options.dtype,
        max_file_bytes=options.max_file_size,
        tied=not options.tied_once,
        verify=not options.no_verify,
    )
    for path in paths:
        print(path)
    return 0


def _inspect(options: argparse.Namespace) -> int:
    manifest = json.loads(_C.read_manifest(options.directory))
    for name, value in _summary(manifest):
        print(f"{name}: {value}")
    print()
    rows = [_row(tensor) for tensor in manifest["tensors"]]
    for line in _table(("name", "kind", "dtype", "shape", "bytes", "pieces"), rows):
        print(line)
    print()
    for line in _totals(manifest):
        print(line)
    if options.no_verify:
        return 0
    problems = _C.verify_checkpoint(options.directory)
    print()
    for file, text in problems:
        print(f"{file}: {text}")
    if problems:
        print(f"damaged: {len(problems)} problem{'s' if len(problems) > 1 else ''}")
        return 1
    print(f"verified: {sum(len(tensor['pieces']) for tensor in manifest['tensors'])} pieces")
    return 0


def _summary(manifest: dict[str, Any]) -> Iterable[tuple[str, Any]]:
    yield "written by", f"{manifest['library']}, torch {manifest['torch']}"
    yield "manifest version", manifest["version"]
    yield "world size", manifest["world_size"]
    yield "stage", manifest["stage"]
    optimizer = manifest["optimizer"]
    if optimizer is None:
        yield "optimizer", "none"
    else:
        yield "optimizer", optimizer["rule"]
        for at, group in enumerate(optimizer["groups"]):
            yield f"group {at}", _group(group)
        yield "steps", _steps(optimizer)
    extra = manifest["extra"]
    if isinstance(extra, dict):
        yield "extra", ", ".join(extra) or "empty"
    else:
        yield "extra", "none" if extra is None else type(extra).__name__
    for name, same_as in manifest["tied"]:
        yield "tied", f"{name} = {same_as}"


def _group(group: dict[str, Any]) -> str:
    names = group.get("params", ())
    settings = ", ".join(f"{key} {value}" for key, value in group.items() if key != "params")
    return f"{len(names)} parameters, {settings}"


def _steps(optimizer: dict[str, Any]) -> str:
    """How many parameters have taken how many steps."""
    counts = Counter(_step_counts(optimizer))
    return ", ".join(f"{step} ({n} parameters)" for step, n in sorted(counts.items())) or "none"


def _step_counts(optimizer: dict[str, Any]) -> Iterable[Any]:
    for scalars in optimizer.get("scalars", {}).values():
        if isinstance(scalars, dict) and "step" in scalars:
            yield scalars["step"]


def _row(tensor: dict[str, Any]) -> tuple[str, ...]:
    shape = "x".join(map(str, tensor["shape"])) or "scalar"
    pieces = len(tensor["pieces"])
    return (
        tensor["name"],
        tensor["kind"],
        tensor["dtype"],
        shape,
        f"{_bytes_of(tensor):,}",
        str(pieces),
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterable[str]:
    """Columns; from the fifth on they are numbers, to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    for row in (head, *rows):
        cells = [
            text.ljust(width) if at < 4 else text.rjust(width)
            for at, (text, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _totals(manifest: dict[str, Any]) -> Iterable[str]:
    for kind in ("parameter", "buffer", "state"):
        tensors = [tensor for tensor in manifest["tensors"] if tensor["kind"] == kind]
        elements = sum(math.prod(tensor["shape"]) for tensor in tensors)
        size = sum(map(_bytes_of, tensors))
        yield f"{kind}: {len(tensors)} tensors, {elements:,} elements, {size:,} bytes"
    files = manifest["files"]
    yield f"files: {len(files)}, {sum(file['bytes'] for file in files):,} bytes"


def _bytes_of(tensor: dict[str, Any]) -> int:
    bits = 8 if tensor["dtype"] == "BOOL" else int(re.findall(r"\d+", tensor["dtype"])[0])
    return int(math.prod(tensor["shape"])) * bits // 8


def _dtype(text: str) -> torch.dtype:
    dtype = getattr(torch, text.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise argparse.ArgumentTypeError(f"expected a dtype of torch, such as float32, got {text}")
    return dtype


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([a-zA-Z]*)", text.strip())
    if not found or found[2].upper() not in _UNITS or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"expected a size such as 5GB or 500MiB, got {text}")
    return int(found[1]) * _UNITS[found[2].upper()]
