"""Tests that need a CUDA device; each is skipped, and says so, where there is none."""

import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
# The bodies of tests are those of tests/distributed.
sys.path.insert(0, str(HERE.parent / "distributed"))
sys.path.insert(0, str(HERE))

REASON = "no CUDA device" if torch.version.cuda else "torch has no CUDA"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason=REASON))
