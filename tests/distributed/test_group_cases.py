"""Param groups, schedulers, closures and state dicts at stages 0 to 3 (E95, E99, E100)."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import Free, assert_close, mlp, mlp_loss, step_both, weights
from ranks import at_each_stage, run
from torch import nn
from torch.optim import lr_scheduler

import zero_torch as zero

SETTINGS: dict[str, Any] = {"min_unit_numel": 0, "timeout": 20.0}


def _loss(step: int) -> Any:
    return lambda model, rank: mlp_loss(model, rank, step)


class Parts(nn.Module):
    """Vectors and matrices, of which groups are made."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        for name in ("a", "b", "c", "d"):
            self.register_parameter(name, nn.Parameter(torch.randn(7, 3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.a * torch.tanh(x @ self.b) + x @ self.c).square() + (x @ self.d).sin()


def _parts_loss(step: int) -> Any:
    def loss(model: nn.Module, rank: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        return model(torch.randn(4, 7, generator=generator)).mean()

    return loss


def _groups(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [model.a], "lr": 0.02, "betas": (0.5, 0.9)},
        {"params": [model.b], "weight_decay": 0.0},
        {"params": [model.c], "maximize": True},
        {"params": [model.d], "amsgrad": True, "eps": 1e-4},
    ]


def _own_options(rank: int, world: int, stage: int) -> None:
    plain = Parts()
    other = torch.optim.AdamW(_groups(plain), lr=0.01)
    ours = [_module_with_groups] if stage == 3 else [_module_with_groups, _bare_groups]
    models = [Parts() for _ in ours]
    runs = [make(model, stage) for make, model in zip(ours, models, strict=True)]
    start = weights(plain)
    for model, opt in zip(models, runs, strict=True):
        plain.load_state_dict(start)
        other = torch.optim.AdamW(_groups(plain), lr=0.01)
        for step in range(4):
            for at, groups in enumerate(zip(opt.param_groups, other.param_groups, strict=True)):
                for group in groups:  # read live
                    group["lr"] = 0.01 * (at + step + 1)
                    group["betas"] = (0.9 - 0.1 * at, 0.99)
            step_both(model, opt, _parts_loss(step), plain, other, rank, world)
        assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
        assert "max_exp_avg_sq" in zero.full_state(model.d)
        assert "max_exp_avg_sq" not in zero.full_state(model.c)
        other.load_state_dict(copy.deepcopy(opt.state_dict()))


def _module_with_groups(model: nn.Module, stage: int) -> zero.ZeroOptimizer:
    return zero.ZeroOptimizer(model, stage=stage, lr=0.01, param_groups=_groups(model), **SETTINGS)


def _bare_groups(model: nn.Module, stage: int) -> zero.ZeroOptimizer:
    return zero.ZeroOptimizer(_groups(model), stage=stage, lr=0.01, **SETTINGS)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_each_group_has_its_own_options(world: int) -> None:
    run(at_each_stage, world, _own_options)


def _left_out(rank: int, world: int, stage: int) -> None:
    def make(model: nn.Module, names: str, **kw: Any) -> zero.ZeroOptimizer:
        groups = [{"params": [getattr(model, name) for name in names], "weight_decay": 0.5}]
        return zero.ZeroOptimizer(model, stage=stage, param_groups=groups, **kw)

    with pytest.raises(ValueError, match="'d' is in none of the param_groups"):
        make(Parts(), "abc")
    model = Parts()
    model.e = torch.ones(3)
    with pytest.raises(ValueError, match="group 0 parameter 1 is not one of the module's"):
        make(model, "ae")
    assert len(make(Parts(), "abc", ignored_params=["d"]).param_groups) == 1
    model = Parts()
    model.d.requires_grad_(False)
    opt = make(model, "abc")
    assert [len(group["params"]) for group in opt.param_groups] == [3, 1]
    assert [group["weight_decay"] for group in opt.param_groups] == [0.5, 0.01]
    wrapped = zero.ZeroModule(Parts(), stage=stage)
    with pytest.raises(ValueError, match="param_groups"):
        zero.ZeroOptimizer(wrapped, param_groups=[{"params": list(wrapped.parameters())}])


def test_what_is_in_no_group() -> None:
    run(at_each_stage, 1, _left_out)


def _added(rank: int, world: int, stage: int) -> None:
    for name, cls, kw in (
        ("adamw", torch.optim.AdamW, {"maximize": True, "lr": 0.05}),
        ("adamw", torch.optim.AdamW, {"amsgrad": True, "betas": (0.5, 0.9)}),
        ("sgd", torch.optim.SGD, {"maximize": True, "momentum": 0.9, "weight_decay": 0.1}),
        (torch.optim.Adagrad, torch.optim.Adagrad, {"maximize": True}),
    ):
        model, plain = mlp(), mlp()
        opt = zero.ZeroOptimizer(model, name, stage=stage, lr=0.01, **SETTINGS)
        other = cls(plain.parameters(), lr=0.01)
        step_both(model, opt, _loss(0), plain, other, rank, world)
        for net in (model, plain):
            torch.manual_seed(5)
            net[3].extra = nn.Parameter(torch.randn(3))
            net[3].register_forward_hook(lambda layer, _, output: output * layer.extra.exp())
        group = {"params": [plain[3].extra], **kw}
        opt.add_param_group({"params": [model[3].extra], **kw})
        if cls is torch.optim.Adagrad:  # torch's own can't: its state is made with it
            fresh = cls([{"params": list(plain.parameters())[:-1]}, group], lr=0.01)
            for p, state in other.state.items():
                fresh.state[p] = state
            other = fresh
        else:
            other.add_param_group(group)
        for step in range(1, 4):
            step_both(model, opt, _loss(step), plain, other, rank, world)
        assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)
        want = {index for index, state in other.state_dict()["state"].items() if state}
        assert set(opt.state_dict()["state"]) == want


@pytest.mark.parametrize("world", [1, 2])
def test_groups_added_while_training(world: int) -> None:
    run(at_each_stage, world, _added)


def _added_in_16_bits(rank: int, world: int, stage: int) -> None:
    """What is added computes in param_dtype, too, and has its masters."""
    model = Free(a=torch.ones(5))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1e-4, param_dtype=torch.bfloat16)
    model.a.sum().backward()
    opt.step()
    opt.zero_grad()
    model.register_parameter("b", nn.Parameter(torch.ones(5)))
    opt.add_param_group({"params": [model.b], "lr": 1e-3, "maximize": True})
    assert model.b.dtype == torch.bfloat16
    for _ in range(10):
        (model.a + model.b).sum().backward()
        opt.step()
        opt.zero_grad()
    torch.testing.assert_close(zero.full_param(model.a), torch.full((5,), 1.0 - 11e-4))
    torch.testing.assert_close(zero.full_param(model.b), torch.full((5,), 1.01))
    with zero.gathered(model):
        assert model.b.tolist() == [1.0078125] * 5
    model.norm = nn.BatchNorm1d(3)
    opt.add_param_group({"params": model.norm.parameters()})
    assert model.norm.weight.dtype == torch.float32  # as when it is there at wrap


def test_groups_added_with_masters() -> None:
    run(at_each_stage, 2, _added_in_16_bits)


SCHEDULERS: list[tuple[Callable[[Any], Any], str]] = [
    (lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5**step), "lr"),
    (lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=5), "lr"),
    (lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=6), "betas"),
]


def _scheduled(rank: int, world: int, stage: int) -> None:
    for make, changes in SCHEDULERS:
        model, plain = mlp(), mlp()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.02, **SETTINGS)
        other = torch.optim.AdamW(plain.parameters(), lr=0.02)
        schedulers = [make(opt), make(other)]
        seen = set()
        for step in range(5):
            seen.add(str(opt.param_groups[0][changes]))
            step_both(model, opt, _loss(step), plain, other, rank, world)
            for scheduler in schedulers:
                scheduler.step()
        assert len(seen) == 5
        assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_schedulers_are_read_live(world: int) -> None:
    run(at_each_stage, world, _scheduled)


# E95


def _scheduler_after_load(rank: int, world: int, stage: int) -> None:
    for name in ("sgd", torch.optim.SGD):
        model = Free(w=torch.ones(2))
        opt = zero.ZeroOptimizer(model, name, stage=stage, lr=1.0)
        scheduler = lr_scheduler.ExponentialLR(opt, 0.5)
        kept = opt.param_groups[0]
        model.w.sum().backward()
        opt.step()
        opt.load_state_dict(opt.state_dict())
        scheduler.step()
        assert opt.param_groups[0] is kept
        assert kept["lr"] == scheduler.get_last_lr()[0] == 0.5
        opt.step()
        assert zero.full_param(model.w).tolist() == [-0.5, -0.5]
        kept["lr"] = 0.25
        opt.step()
        assert zero.full_param(model.w).tolist() == [-0.75, -0.75]


def test_e95_a_scheduler_stays_attached_after_load() -> None:
    run(at_each_stage, 2, _scheduler_after_load)


# E99


def _closure(rank: int, world: int, stage: int) -> None:
    model = Free(w=torch.ones(2))
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = model.w.square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert float(opt.step(closure)) == 2.0
    torch.testing.assert_close(zero.full_param(model.w), torch.full((2,), 0.8))
    with pytest.raises(ValueError, match="line search"):
        zero.ZeroOptimizer(Free(w=torch.ones(2)), torch.optim.LBFGS, stage=stage)


def test_e99_step_with_a_closure() -> None:
    run(at_each_stage, 2, _closure)


# E100


def _format(rank: int, world: int, stage: int) -> None:
    model, plain = mlp(), mlp()
    opt = zero.ZeroOptimizer(model, "adam", stage=stage, lr=0.01, **SETTINGS)
    assert opt.state_dict()["state"] == {}
    own = torch.optim.Adam(plain.parameters(), lr=0.01)
    step_both(model, opt, _loss(0), plain, own, rank, world)
    buffer = io.BytesIO()
    torch.save(opt.state_dict(), buffer)
    buffer.seek(0)
    saved, again = torch.load(buffer), opt.state_dict()
    want = own.state_dict()
    assert saved["param_groups"] == again["param_groups"]
    assert [g["params"] for g in saved["param_groups"]] == [
        g["params"] for g in want["param_groups"]
    ]
    assert saved["state"].keys() == again["state"].keys() == want["state"].keys()
    for index, state in want["state"].items():
        assert saved["state"][index].keys() == state.keys()
        assert_close(saved["state"][index], again["state"][index], rtol=0.0, atol=0.0)
        assert_close(saved["state"][index], state, rtol=1e-4, atol=1e-7)
    other = torch.optim.Adam(plain.parameters(), lr=1.0)
    other.load_state_dict(saved)
    step_both(model, opt, _loss(1), plain, other, rank, world)
    assert_close(weights(model), weights(plain), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("world", [1, 2])
def test_e100_format_of_the_state_dict(world: int) -> None:
    run(at_each_stage, world, _format)
