"""The committed stub of the extension is the one that pybind11-stubgen writes."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = ROOT / "python" / "zero_torch" / "_C.pyi"


def test_stub_of_the_extension_is_current(tmp_path):
    pytest.importorskip("pybind11_stubgen")
    command = [sys.executable, "-m", "pybind11_stubgen", "zero_torch._C", "-o", str(tmp_path)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    generated = (tmp_path / "zero_torch" / "_C.pyi").read_text()
    assert COMMITTED.read_text() == generated, "bindings have changed: run `make stubs`"
