"""Averages of weights in checkpoints: exactly, at other numbers of ranks and stages."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_cases import SMALL, in_folder, make, train
from models import assert_equal, make_gpt
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

SETTINGS: list[dict[str, Any]] = [
    {},
    {"param_dtype": torch.bfloat16},
    {"rule": torch.optim.RMSprop},
]
DECAY = 0.75


def _stages(setting: int) -> tuple[int, ...]:
    """Of runs that load; they were saved one stage below."""
    return (0, 1, 2, 3) if setting == 0 else (0, 3)


def _averages(ema: zero.EMA, model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: ema.average(p) for name, p in model.named_parameters()}


def _full(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: zero.full_param(p) for name, p in model.named_parameters()}


def _trained(stage: int, rank: int, steps: range, **given: Any) -> tuple[Any, Any, zero.EMA]:
    """With averages by their rule, written out over whole tensors."""
    model, opt = make(stage, **given)
    ema = zero.EMA(opt, DECAY)
    want = {name: value.float() for name, value in _full(model).items()}
    for step in steps:
        train(model, opt, rank, range(step, step + 1))
        ema.update()
        for name, value in _full(model).items():
            want[name].lerp_(value.float(), 1 - DECAY)
    assert_equal(_averages(ema, model), want)
    return model, opt, ema


def _save_with_averages(rank: int, world: int, folder: str) -> None:
    for at, given in enumerate(SETTINGS):
        for stage in ((stage + 3) % 4 for stage in _stages(at)):
            model, opt, ema = _trained(stage, rank, range(3), **given)
            path = f"{folder}/{at}-{stage}"
            zero.save(path, model, opt, ema=ema)
            values = _averages(ema, model)
            if rank == 0:
                torch.save(values, path + ".pt")


def _load_averages(rank: int, world: int, folder: str) -> None:
    for at, given in enumerate(SETTINGS):
        for stage in _stages(at):
            path = f"{folder}/{at}-{(stage + 3) % 4}"
            model, opt = make(stage, seed=1, **given)
            ema = zero.EMA(opt)
            zero.load(path, model, opt, ema=ema)
            want = torch.load(path + ".pt")
            assert (ema.decay, ema.updates) == (DECAY, 3)
            assert_equal(_averages(ema, model), want)
            # On: the rule over whole tensors, from what was saved.
            for step in range(3, 5):
                train(model, opt, rank, range(step, step + 1))
                ema.update()
                for name, value in _full(model).items():
                    want[name].lerp_(value.float(), 1 - DECAY)
            assert_equal(_averages(ema, model), want)
            # Of the model alone, and of model and averages: neither needs the optimizer.
            other, _ = make(stage, seed=2, **given)
            zero.load(path, other)
            alone = zero.EMA(other)
            zero.load(path, other, ema=alone)
            assert_equal(_averages(alone, other), torch.load(path + ".pt"))


def test_averages_load_at_other_ranks_and_stages(tmp_path: Path) -> None:
    run(_save_with_averages, 2, str(tmp_path))
    run(_load_averages, 3, str(tmp_path))


@in_folder
def _goes_on(rank: int, world: int, stage: int, folder: str) -> None:
    model, _, ema = _trained(stage, rank, range(5))
    half, half_opt, half_ema = _trained(stage, rank, range(3))
    zero.save(folder, half, half_opt, ema=half_ema)
    fresh, fresh_opt = make(stage, seed=1)
    fresh_ema = zero.EMA(fresh_opt)
    zero.load(folder, fresh, fresh_opt, ema=fresh_ema)
    for step in range(3, 5):
        train(fresh, fresh_opt, rank, range(step, step + 1))
        fresh_ema.update()
    assert_equal(_full(fresh), _full(model))
    assert_equal(_averages(fresh_ema, fresh), _averages(ema, model))
    # Without `ema` there is nothing of it in what is loaded.
    zero.load(folder, fresh, fresh_opt)
    assert_equal(_averages(fresh_ema, fresh), _averages(ema, model))
    assert_equal(_full(fresh), _full(half))


@in_folder
def _is_refused(rank: int, world: int, stage: int, folder: str) -> None:
    model, opt, ema = _trained(stage, rank, range(1))
    zero.save(f"{folder}/without", model, opt)
    weights, averages = _full(model), _averages(ema, model)
    train(model, opt, rank, range(1, 2))
    moved = _full(model)
    with pytest.raises(ValueError, match=r"averages of an EMA in .*without"):
        zero.load(f"{folder}/without", model, opt, ema=ema)
    assert_equal(_full(model), moved)
    other, other_opt = make(stage)
    for call in (zero.save, zero.load):
        with pytest.raises(ValueError, match="EMA of the model's own"):
            call(f"{folder}/without", model, opt, ema=zero.EMA(other_opt))
        with pytest.raises(TypeError, match=r"zero\.EMA"):
            call(f"{folder}/without", model, opt, ema=other)  # type: ignore[operator]
    with ema.swapped():
        with pytest.raises(RuntimeError, match="save"):
            zero.save(f"{folder}/swapped", model, opt, ema=ema)
        with pytest.raises(RuntimeError, match="averages"):
            zero.load(f"{folder}/without", model)
        zero.save(f"{folder}/averages", model)  # as the model's weights
    assert not os.path.exists(f"{folder}/swapped")
    assert_equal(_full(model), moved)
    zero.load(f"{folder}/averages", model)
    assert_equal(_full(model), averages)
    zero.load(f"{folder}/without", model, opt)
    assert_equal(_full(model), weights)


@in_folder
def _frozen(rank: int, world: int, stage: int, folder: str) -> None:
    """What was frozen when it was saved starts at its loaded values."""
    pairs = []
    for seed in (0, 1):
        model = make_gpt(seed)
        model.norm.weight.requires_grad_(seed == 1)
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.01, **SMALL)
        pairs.append((model, zero.EMA(opt)))
    (model, ema), (fresh, fresh_ema) = pairs
    zero.save(folder, model, ema=ema)
    zero.load(folder, fresh, ema=fresh_ema)
    assert_equal(_full(fresh), _full(model))
    assert_equal(_averages(fresh_ema, fresh), _full(model))


@pytest.mark.parametrize("world", [1, 3])
def test_a_run_with_averages_goes_on_bit_for_bit(world: int) -> None:
    run(at_each_stage, world, _goes_on, _frozen)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    run(at_each_stage, 2, _is_refused)


def test_damage_is_noticed_and_a_model_needs_no_averages(tmp_path: Path) -> None:
    model, opt, ema = _trained(0, 0, range(2))
    zero.save(tmp_path / "c", model, opt, ema=ema)
    manifest = json.loads((tmp_path / "c" / "manifest.json").read_text())
    names = [t["name"] for t in manifest["tensors"] if t["name"].endswith(":zero.ema")]
    assert len(names) == len(list(model.parameters()))
    shutil.copytree(tmp_path / "c", tmp_path / "d")
    for file in (tmp_path / "d").glob("optimizer-*"):
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with (
        pytest.warns(UserWarning, match="optimizer is not loaded"),
        pytest.raises(ValueError, match="checksum"),
    ):
        zero.load(tmp_path / "d", model, ema=ema)
    for file in (tmp_path / "d").glob("optimizer-*"):
        file.unlink()
    with pytest.warns(UserWarning, match="optimizer is not loaded"):
        zero.load(tmp_path / "d", model)
