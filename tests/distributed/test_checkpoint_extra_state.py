"""Modules' extra state in checkpoints, and what JSON has no form for."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import in_folder
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero
from zero_torch._manifest_json import from_json, to_exact_json, to_json


class Counting(nn.Linear):
    """Keeps how often it ran, and a history, outside of its tensors."""

    def __init__(self) -> None:
        super().__init__(3, 3)
        self.state: Any = {"calls": 0, "scales": torch.zeros(2, dtype=torch.bfloat16)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["calls"] += 1
        self.state["scales"][0] += 1
        return super().forward(x)

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


def _model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Counting(), nn.Tanh(), torch.compile(Counting(), backend="eager"))


@in_folder
def _goes_along(rank: int, world: int, stage: int, folder: str) -> None:
    model = _model()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, min_unit_numel=0)
    for calls in range(3):
        model(torch.ones(2, 3) * calls).sum().backward()
        opt.step()
        opt.zero_grad()
    zero.save(folder, model, opt)
    other = _model()
    loaded = zero.ZeroOptimizer(other, stage=(stage + 1) % 4, lr=0.1, min_unit_numel=0)
    zero.load(folder, other, loaded)
    for part in (other[0], other[2]._orig_mod):
        state = part.get_extra_state()
        assert state["calls"] == 3
        assert torch.equal(state["scales"], torch.tensor([3.0, 0.0], dtype=torch.bfloat16))
    plain = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3))
    with pytest.raises(ValueError, match=r"unexpected: \['0._extra_state', '2._extra_state'\]"):
        zero.load(folder, plain)
    zero.load(folder, plain, strict=False)
    assert torch.equal(plain[0].weight, zero.full_param(model[0].weight))
    model[0].state = object()
    with pytest.raises(TypeError, match=r"extra_state\['0._extra_state'\]"):
        zero.save(folder, model, opt)


def test_of_the_module_in_a_zero_module(tmp_path: Path) -> None:
    wrapped = zero.ZeroModule(Counting(), stage=3)
    wrapped(torch.ones(2, 3))
    zero.save(tmp_path / "c", wrapped)
    other = Counting()
    zero.load(tmp_path / "c", other)
    assert other.state["calls"] == 1
    wrapped(torch.ones(2, 3))
    zero.load(tmp_path / "c", wrapped)
    assert wrapped.module.state["calls"] == 1


def test_extra_state_of_modules_goes_along() -> None:
    run(at_each_stage, 2, _goes_along)


def test_what_json_has_no_form_for_comes_back_exactly() -> None:
    stream = io.BytesIO(b"\x00\xff")
    value = {
        "numbers": [1, 2.5, True, None, math.inf, -math.inf],
        "tuple": (1, ("a", [2])),
        "bytes": b"\x01\x80",
        3: {"$tuple": "a user's own key"},
        "empty": torch.zeros(0, 2, dtype=torch.int64),
        "scalar": torch.tensor(math.nan, dtype=torch.float64),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }
    got = from_json(to_exact_json("x", {**value, "stream": stream}))
    assert got.pop("stream").read() == b"\x00\xff"
    assert list(got) == list(value)
    for key in ("numbers", "tuple", "bytes", 3):
        assert got[key] == value[key], key
        assert type(got[key]) is type(value[key])
    for key in ("empty", "scalar", "turned"):
        assert got[key].dtype == value[key].dtype
        torch.testing.assert_close(got[key], value[key], rtol=0, atol=0, equal_nan=True)
    with pytest.raises(TypeError, match=r"x\['set'\]"):
        to_exact_json("x", {"set": {1}})


def test_a_user_s_extra_may_have_any_keys(tmp_path: Path) -> None:
    extra = {"$float": "not a number", "nested": {"$bytes": [1]}, "inf": math.inf}
    model = nn.Linear(2, 2)
    zero.save(tmp_path / "c", model, extra=extra)
    assert zero.load(tmp_path / "c", model) == extra
    assert from_json(to_json("x", {"$dict": 1})) == {"$dict": 1}
