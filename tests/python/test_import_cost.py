"""Zero doesn't drag in what it doesn't need."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from zero_torch import native

TRAIN = """
import sys, torch
import zero_torch as zero
model = torch.nn.Linear(4, 4)
opt = zero.ZeroOptimizer(model, stage=2, lr=1e-3)
model(torch.ones(1, 4)).sum().backward()
opt.clip_grad_norm_(1.0)
opt.step()
opt.zero_grad()
assert "torch._dynamo" not in sys.modules
"""


def test_training_does_not_import_dynamo() -> None:
    subprocess.run([sys.executable, "-c", TRAIN], check=True, timeout=60)


@pytest.mark.parametrize("name", ["adamw", "adam", "sgd"])
def test_defaults_are_torchs(name: str) -> None:
    cls = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam, "sgd": torch.optim.SGD}[name]
    plain = cls([torch.zeros(1)]).defaults
    assert native.defaults(name, {}, ()) == plain
