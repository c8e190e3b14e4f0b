"""E57: names are those of the plain model, whatever torch wraps around its modules."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from checkpoint_cases import SMALL, in_folder, train
from models import GPT, assert_equal, make_gpt
from ranks import at_each_stage, run
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointWrapper,
    checkpoint_wrapper,
)

import zero_torch as zero
from zero_torch import _names

MARKS = ("_orig_mod", "_checkpoint_wrapped_module", "module.")


def _compiled(module: nn.Module) -> nn.Module:
    return torch.compile(module, backend="eager")  # type: ignore[return-value]


def _each_block(model: GPT, wrap: Any) -> GPT:
    for at, block in enumerate(model.blocks):
        model.blocks[at] = wrap(block)
    return model


def _nested(model: GPT) -> nn.Module:
    model.blocks[0] = _compiled(checkpoint_wrapper(model.blocks[0]))
    model.blocks[1] = checkpoint_wrapper(_compiled(model.blocks[1]))
    model.norm = checkpoint_wrapper(checkpoint_wrapper(model.norm))
    return _compiled(model)


def _in_place(model: GPT) -> GPT:
    model.compile(backend="eager")
    return model


WRAPS: dict[str, Any] = {
    "plain": lambda model: model,
    "compiled": _compiled,
    "compiled in place": _in_place,
    "compiled blocks": lambda model: _each_block(model, _compiled),
    "checkpointed blocks": lambda model: _each_block(model, checkpoint_wrapper),
    "nested": _nested,
}


def _make(wrap: str, stage: int, seed: int) -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = WRAPS[wrap](make_gpt(seed))
    settings: dict[str, Any] = {"timeout": 30.0, **SMALL}
    if wrap == "nested":
        model = zero.ZeroModule(model, stage=stage, **settings)
        settings = {}
    return model, zero.ZeroOptimizer(model, stage=stage, lr=1e-2, **settings)


def _values(model: nn.Module, opt: zero.ZeroOptimizer) -> dict[str, torch.Tensor]:
    engine = opt._live
    return {
        engine.parameter(at)[0]: engine.full_parameter(at) for at in range(engine.parameter_count())
    }


@in_folder
def _any_to_any(rank: int, world: int, stage: int, folder: str) -> None:
    plain = make_gpt(7)
    names = [name for name, _ in plain.named_parameters()]
    units = zero.ZeroModule(make_gpt(7), stage=3, **SMALL)._engine.unit_names()
    saved: dict[str, dict[str, torch.Tensor]] = {}
    for wrap in WRAPS:
        model, opt = _make(wrap, stage, seed=1)
        engine = opt._live
        assert [engine.parameter(at)[0] for at in range(len(names))] == names, wrap
        if stage == 3:
            assert engine.unit_names() == units, wrap
        train(model, opt, rank, range(1))
        saved[wrap] = _values(model, opt)
        assert_equal(saved[wrap], saved["plain"])
        zero.save(f"{folder}/{wrap}", model, opt, extra=wrap)
        zero.load(f"{folder}/{wrap}", plain)
        assert_equal(dict(plain.named_parameters()), saved[wrap])
    for before, wrap in itertools.pairwise([*WRAPS, "plain"]):
        model, opt = _make(wrap, (stage + 1) % 4, seed=2)
        assert zero.load(f"{folder}/{before}", model, opt) == before
        assert_equal(_values(model, opt), saved[before])
        train(model, opt, rank, range(1, 2))


@in_folder
def _state_dicts(rank: int, world: int, stage: int, folder: str) -> None:
    plain = make_gpt(7)
    keys = list(plain.state_dict())
    for wrap in WRAPS:
        model, opt = _make(wrap, stage, seed=1)
        state = zero.state_dict(model, rank0_only=False)
        assert list(state) == keys, wrap
        assert list(zero.state_dict(model, full=False)) == keys, wrap
        plain.load_state_dict(state)
        wanted = make_gpt(8).state_dict()
        for every_rank in (False, True):
            zero.load_state_dict(model, dict(wanted), rank0_only=not every_rank)
            got = _values(model, opt)
            assert all(torch.equal(value, wanted[name]) for name, value in got.items()), wrap
            lacking = {k: v for k, v in wanted.items() if k != "blocks.1.up.weight"}
            wrong = {**wanted, "blocks.0.up.bias": torch.zeros(3)}
            for bad, name in ((lacking, "blocks.1.up.weight"), (wrong, "blocks.0.up.bias")):
                with pytest.raises(RuntimeError, match=name) as raised:
                    zero.load_state_dict(model, bad, rank0_only=not every_rank)
                assert not any(mark in str(raised.value) for mark in MARKS), raised.value
        # torch's own names too
        theirs = model.state_dict()
        zero.load_state_dict(model, {k: v.clone() for k, v in theirs.items()}, rank0_only=False)


@in_folder
def _missing(rank: int, world: int, stage: int, folder: str) -> None:
    shallow = GPT(depth=1)
    zero.save(folder, *_plain_pair(shallow, stage))
    for wrap in ("compiled", "nested"):
        model, opt = _make(wrap, stage, seed=1)
        with pytest.raises(ValueError, match=r"'blocks\.1\.up\.weight'") as raised:
            zero.load(folder, model)
        assert not any(mark in str(raised.value) for mark in MARKS)
        with pytest.raises(ValueError, match=r"'blocks.9' is not|blocks\.9"):
            zero.ZeroModule(WRAPS[wrap](make_gpt()), stage=3, units=["blocks.9"])
        del opt


def _plain_pair(model: nn.Module, stage: int) -> tuple[nn.Module, zero.ZeroOptimizer]:
    return model, zero.ZeroOptimizer(model, stage=stage, lr=0.1, timeout=30.0, **SMALL)


def test_e57_any_wrapper_to_any_other() -> None:
    run(at_each_stage, 2, _any_to_any, limit_s=240.0)


def test_e57_state_dicts_and_their_errors() -> None:
    run(at_each_stage, 2, _state_dicts, _missing, limit_s=240.0)


def test_a_deferred_model_is_initialized_by_plain_names() -> None:
    values = make_gpt(4).state_dict()
    for wrap in ("checkpointed blocks", "nested"):
        for stage in (1, 3):
            with zero.deferred_init():
                model = make_gpt()
            module = zero.ZeroModule(WRAPS[wrap](model), stage=stage, init_from=values)
            got = zero.state_dict(module)
            assert list(got) == list(values), wrap
            assert all(torch.equal(got[name], value) for name, value in values.items())


def test_units_are_chosen_by_plain_names_and_classes() -> None:
    for units in (["blocks.0", "blocks.1"], [type(make_gpt().blocks[0])], _is_block):
        for wrap, make in WRAPS.items():
            module = zero.ZeroModule(make(make_gpt()), stage=3, units=units, min_unit_numel=0)
            assert module._engine.unit_names() == ["", "blocks.0", "blocks.1"], wrap


def _is_block(name: str, module: nn.Module) -> bool:
    return name.startswith("blocks.") and type(module).__name__ == "Block"


class _Inner(nn.Module):
    """With a parameter, a buffer and extra state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.layer = checkpoint_wrapper(nn.Linear(3, 3))
        self.register_buffer("seen", torch.zeros(2))
        self.extra = 0

    def get_extra_state(self) -> Any:
        return {"extra": self.extra}

    def set_extra_state(self, state: Any) -> None:
        self.extra = state["extra"]


class _Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.head = nn.Linear(3, 1)


def _inside(rank: int, world: int, stage: int) -> None:
    for around in (_Outer, _compiled, lambda module: _compiled(_Outer(module))):
        plain = around(_Inner())
        wanted: dict[str, Any] = {
            name: torch.full_like(value, 2.0) if isinstance(value, torch.Tensor) else {"extra": 7}
            for name, value in _names.to_plain(plain, plain.state_dict()).items()
        }
        inner = _Inner()
        model = around(zero.ZeroModule(inner, stage=stage, min_unit_numel=0))
        assert list(zero.state_dict(model, rank0_only=False)) == list(wanted)
        zero.load_state_dict(model, wanted if rank == 0 else None)
        for full in (True, False):
            got = zero.state_dict(model, full=full, rank0_only=False)
            assert inner.extra == 7
            inner.extra = 0
            zero.load_state_dict(model, got, full=full)
            assert inner.extra == 7
            got = zero.state_dict(model, rank0_only=False)
            assert list(got) == list(wanted)
            tensors = {name for name, value in wanted.items() if isinstance(value, torch.Tensor)}
            assert all(torch.equal(got[name], wanted[name]) for name in tensors)


@pytest.mark.parametrize("world", [1, 2])
def test_a_zero_module_inside_of_others(world: int) -> None:
    run(at_each_stage, world, _inside)


class _Own(nn.Module):
    """Has modules of its own by the wrappers' names."""

    def __init__(self) -> None:
        super().__init__()
        self._orig_mod = nn.Linear(2, 2)
        self.module = nn.Linear(2, 2)
        self.inner = nn.Sequential(nn.Linear(2, 2))
        self.inner.add_module("_checkpoint_wrapped_module", nn.Linear(2, 2))


def test_a_users_own_names_stay() -> None:
    own = _Own()
    names = [name for name, _ in own.named_parameters()]
    assert "_orig_mod.weight" in names and "inner._checkpoint_wrapped_module.bias" in names
    assert [name for name, _ in _names.named_parameters(own)] == names
    around = _compiled(checkpoint_wrapper(_Own()))
    assert [name for name, _ in _names.named_parameters(around)] == names
    assert list(_names.to_plain(around, around.state_dict())) == names
    assert isinstance(around._modules["_orig_mod"], CheckpointWrapper)
    for prefix in ("", "_orig_mod.", "_orig_mod._checkpoint_wrapped_module."):
        assert list(_names.read(around, {prefix + name: 0 for name in names})) == names, prefix
    assert list(_names.read(own, dict.fromkeys(names))) == names
    around.load_state_dict(_names.from_plain(around, own.state_dict()))
    assert_equal(dict(_names.named_parameters(around)), dict(own.named_parameters()))
