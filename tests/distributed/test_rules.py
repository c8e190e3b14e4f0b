"""Rules and their state at stages 0 to 3: amsgrad, maximize, Lion, torch's classes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from models import Free, assert_close, mlp, mlp_loss, step_both, weights
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

SETTINGS = {"units": [nn.Linear], "min_unit_numel": 0, "timeout": 20.0}

NATIVE = [
    ("adamw", torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    ("adam", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "maximize": True}),
    ("adamw", torch.optim.AdamW, {"lr": 1e-2, "maximize": True}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "maximize": True, "momentum": 0.9}),
]

FOREIGN = [
    (torch.optim.Adagrad, {"lr": 1e-2, "maximize": True}),
    (torch.optim.RMSprop, {"lr": 1e-3, "momentum": 0.5, "centered": True, "maximize": True}),
    (torch.optim.RAdam, {"lr": 1e-2, "decoupled_weight_decay": True, "maximize": True}),
    (torch.optim.NAdam, {"lr": 1e-2, "maximize": True}),
    (torch.optim.Adamax, {"lr": 1e-2, "maximize": True}),
]


def _native(rank: int, world: int, stage: int) -> None:
    for name, cls, kw in NATIVE:
        model, plain = mlp(), mlp()
        opt = zero.ZeroOptimizer(model, name, stage=stage, **SETTINGS, **kw)
        other = cls(plain.parameters(), **kw)
        for step in range(3):
            loss = _loss(step)
            step_both(model, opt, loss, plain, other, rank, world)
        assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-5)
        _exchange_states(model, opt, name, cls, kw, stage, rank, world)


def _loss(step: int) -> Any:
    return lambda model, rank: mlp_loss(model, rank, step)


def _exchange_states(
    model: nn.Module,
    opt: zero.ZeroOptimizer,
    name: str,
    cls: Any,
    kw: dict[str, Any],
    stage: int,
    rank: int,
    world: int,
) -> None:
    """Ours into plain torch's, and that into ours again: both go on alike."""
    saved = copy.deepcopy(opt.state_dict())
    values = {key: value.clone() for key, value in weights(model).items()}
    plain = mlp()
    plain.load_state_dict(values)
    other = cls(plain.parameters())
    other.load_state_dict(saved)
    again = other.state_dict()
    assert {k: set(v) for k, v in again["state"].items()} == {
        k: set(v) for k, v in saved["state"].items()
    }
    assert ("max_exp_avg_sq" in again["state"][0]) == kw.get("amsgrad", False)
    fresh = mlp()
    fresh.load_state_dict(values)
    loaded = zero.ZeroOptimizer(fresh, name, stage=stage, **SETTINGS, **kw)
    loaded.load_state_dict(copy.deepcopy(again))
    step_both(fresh, loaded, _loss(3), plain, other, rank, world)
    assert_close(weights(fresh), weights(plain), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_amsgrad_and_maximize_are_torch_s(world: int) -> None:
    run(at_each_stage, world, _native)


def _lion(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.linspace(-1, 1, 37))
    want, moment = torch.linspace(-1, 1, 37), torch.zeros(37)
    opt = zero.ZeroOptimizer(
        model, "lion", stage=stage, lr=0.01, betas=(0.8, 0.95), weight_decay=0.1
    )
    for step in range(4):
        own = [torch.randn(37, generator=_seeded(10 * step + r)) for r in range(world)]
        (model.w * own[rank]).sum().backward()
        opt.step()
        opt.zero_grad()
        mean = sum(own) / world
        want = want - 0.01 * (torch.sign(0.8 * moment + 0.2 * mean) + 0.1 * want)
        moment = 0.95 * moment + 0.05 * mean
        torch.testing.assert_close(zero.full_param(model.w), want, rtol=1e-5, atol=1e-6)
    saved = opt.state_dict()
    assert set(saved["state"][0]) == {"exp_avg"}
    torch.testing.assert_close(saved["state"][0]["exp_avg"], moment, rtol=1e-5, atol=1e-6)
    group = saved["param_groups"][0]
    assert {key: group[key] for key in ("lr", "betas", "weight_decay", "maximize")} == {
        "lr": 0.01,
        "betas": (0.8, 0.95),
        "weight_decay": 0.1,
        "maximize": False,
    }
    fresh = Free(w=want.clone())
    loaded = zero.ZeroOptimizer(fresh, "lion", stage=stage)
    assert loaded.defaults == {
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    }
    loaded.load_state_dict(copy.deepcopy(saved))
    (fresh.w * 0.0).sum().backward()
    loaded.step()
    want = want - 0.01 * (torch.sign(moment) + 0.1 * want)
    torch.testing.assert_close(zero.full_param(fresh.w), want, rtol=1e-5, atol=1e-6)


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_lion_is_its_formula(world: int) -> None:
    run(at_each_stage, world, _lion)


def _amsgrad_too_late(rank: int, world: int, stage: int) -> None:
    model = Free(a=torch.ones(5), b=torch.ones(5))
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    (model.a + model.b).sum().backward()
    opt.step()
    before = weights(model)
    opt.param_groups[0]["amsgrad"] = True
    with pytest.raises(ValueError, match=r"amsgrad=true for parameter '[ab]'.*max_exp_avg_sq"):
        opt.step()
    assert_close(weights(model), before, rtol=0.0, atol=0.0)

    # Begun with it, it may be switched off and on: the maximum waits, as in torch.
    model, w = Free(w=torch.ones(5)), nn.Parameter(torch.ones(5))
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, amsgrad=True)
    plain = torch.optim.AdamW([w], lr=0.1, amsgrad=True)
    for gradient, amsgrad in ((5.0, True), (0.1, False), (0.2, True), (0.1, True)):
        opt.param_groups[0]["amsgrad"] = plain.param_groups[0]["amsgrad"] = amsgrad
        (model.w * gradient).sum().backward()
        w.grad = torch.full((5,), gradient)
        opt.step()
        plain.step()
        opt.zero_grad()
        got, want = opt.state_dict()["state"][0], plain.state_dict()["state"][0]
        assert_close(got, want, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(zero.full_param(model.w), w.detach(), rtol=1e-5, atol=1e-6)
    # Loaded into an optimizer without, it is there from then on.
    other = zero.ZeroOptimizer(Free(w=torch.ones(5)), stage=stage, lr=0.1)
    other.load_state_dict(copy.deepcopy(plain.state_dict()))
    assert other.param_groups[0]["amsgrad"]
    assert_close(other.state_dict()["state"][0], plain.state_dict()["state"][0])


def test_amsgrad_is_switched_on_before_the_first_step() -> None:
    run(at_each_stage, 2, _amsgrad_too_late)


def _foreign(rank: int, world: int, stage: int) -> None:
    for cls, kw in FOREIGN:
        model, plain = mlp(), mlp()
        opt = zero.ZeroOptimizer(model, cls, stage=stage, **SETTINGS, **kw)
        other = cls(plain.parameters(), **kw)
        for step in range(3):
            step_both(model, opt, _loss(step), plain, other, rank, world)
        try:
            assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
        except AssertionError as error:
            raise AssertionError(f"{cls.__name__}: {error}") from error


@pytest.mark.parametrize("world", [1, 2])
def test_classes_of_torch_maximize_on_shards(world: int) -> None:
    run(at_each_stage, world, _foreign)


def _foreign_in_16_bits(rank: int, world: int, stage: int) -> None:
    """They see fp32 shards: what they do is what they do to an fp32 parameter."""
    for cls, kw in FOREIGN:
        start = torch.linspace(0.5, 1.5, 37)
        model, w = Free(w=start.clone()), nn.Parameter(start.clone())
        opt = zero.ZeroOptimizer(model, cls, stage=stage, param_dtype=torch.bfloat16, **kw)
        plain = cls([w], **kw)
        for step in range(4):
            gradient = float(2 ** (step % 3)) * (-1) ** step  # exact in 16 bits
            (model.w * gradient).sum().backward()
            opt.step()
            opt.zero_grad()
            w.grad = torch.full((37,), gradient)
            plain.step()
        assert model.w.dtype == torch.bfloat16
        got = zero.full_param(model.w)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, w.detach(), rtol=1e-5, atol=1e-6, msg=cls.__name__)
        for key, value in opt.state_dict()["state"][0].items():
            want = plain.state_dict()["state"][0][key]
            torch.testing.assert_close(
                torch.as_tensor(value), torch.as_tensor(want), rtol=1e-5, atol=1e-6
            )


def test_classes_of_torch_step_fp32_masters() -> None:
    run(at_each_stage, 2, _foreign_in_16_bits)


def _masters(rank: int, world: int, stage: int) -> None:
    given = torch.linspace(0.5, 1.5, 37)
    rules: list[tuple[str, Any, dict[str, Any]]] = [
        ("adamw", torch.optim.AdamW, {"lr": 0.01, "amsgrad": True}),
        ("adam", torch.optim.Adam, {"lr": 0.01, "maximize": True}),
        ("sgd", torch.optim.SGD, {"lr": 0.01, "maximize": True}),
    ]
    for name, cls, kw in rules:
        model, w = Free(w=given.clone()), nn.Parameter(given.clone())
        opt = zero.ZeroOptimizer(model, name, stage=stage, param_dtype=torch.bfloat16, **kw)
        plain = cls([w], **kw)
        for gradient in (4.0, -0.5, 0.25):
            (model.w * gradient).sum().backward()
            opt.step()
            opt.zero_grad()
            w.grad = torch.full((37,), gradient)
            plain.step()
        torch.testing.assert_close(zero.full_param(model.w), w.detach(), rtol=1e-6, atol=1e-6)
        with zero.gathered(model):
            assert torch.equal(model.w.detach(), w.detach().bfloat16()), name


def test_new_options_of_rules_with_masters() -> None:
    run(at_each_stage, 2, _masters)
