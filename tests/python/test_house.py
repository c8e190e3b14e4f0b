"""The rules of the house that a compiler does not check."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

# Data flows down this list; a folder includes itself and those above it.
ROOMS = ["layout", "memory", "comm", "sharding", "autograd", "nn", "optim", "checkpoint"]
OPEN_TO_ALL = {"zero/api.h", "zero/options.h"}
LINES = 400

SOURCE_FOLDERS = ["zero", "csrc", "tests", "examples", "python", "benchmarks"]
INSTALLED = [ROOT / "python" / "zero_torch" / name for name in ("lib", "include", "share")]


def files(*suffixes, folders=SOURCE_FOLDERS):
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in suffixes and not any(i in path.parents for i in INSTALLED):
                yield path


def includes(path):
    for line in path.read_text().splitlines():
        found = re.match(r'\s*#\s*include\s+[<"]((?:zero|csrc)/[^>"]+)[>"]', line)
        if found:
            yield found[1]


def forbidden(path):
    """The includes of a file in zero/ROOM/ that its place does not allow."""
    room = path.relative_to(ROOT / "zero").parts[0]
    allowed = {f"zero/{r}" for r in ROOMS[: ROOMS.index(room) + 1]} | {"csrc/kernels"}
    for include in includes(path):
        if include not in OPEN_TO_ALL and "/".join(include.split("/")[:2]) not in allowed:
            yield include


def test_every_folder_is_a_room():
    folders = {path.name for path in (ROOT / "zero").iterdir() if path.is_dir()}
    assert folders <= set(ROOMS), "name the folder in ROOMS, in its place"


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_includes_only_rooms_above_it(room):
    paths = files(".h", ".cpp", folders=[f"zero/{room}"])
    wrong = {str(p.relative_to(ROOT)): list(forbidden(p)) for p in paths}
    assert {p: names for p, names in wrong.items() if names} == {}


def test_an_include_out_of_order_is_noticed(tmp_path, monkeypatch):
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    path = tmp_path / "zero" / "memory" / "buffer.h"
    path.parent.mkdir(parents=True)
    path.write_text("#include <zero/layout/flat_layout.h>\n#include <zero/comm/init.h>\n")
    assert list(forbidden(path)) == ["zero/comm/init.h"]


def test_kernels_include_no_room():
    wrong = {
        str(p.relative_to(ROOT)): [i for i in includes(p) if i.startswith("zero/")]
        for p in files(".h", ".cpp", ".cu", folders=["csrc/kernels"])
    }
    assert {p: names for p, names in wrong.items() if names} == {}


def test_every_source_is_in_the_build():
    listed = set(
        re.findall(r"[\w/]+\.(?:cpp|cu)\b", (ROOT / "cmake" / "sources.cmake").read_text())
    )
    present = {
        str(p.relative_to(ROOT))
        for p in files(".cpp", ".cu", folders=["zero", "csrc", "tests/cpp"])
    }
    assert listed == present


def test_files_are_short():
    lengths = {
        str(p.relative_to(ROOT)): len(p.read_text().splitlines())
        for p in files(".h", ".cpp", ".cu", ".py")
    }
    assert {p: n for p, n in lengths.items() if n > LINES} == {}


def test_headers_are_guarded():
    paths = files(".h", folders=["zero", "csrc"])
    assert [str(p) for p in paths if "#pragma once" not in p.read_text()] == []
