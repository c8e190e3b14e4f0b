"""Reports by users of other systems, as requirements of this one (stages 0 to 3)."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable

import pytest
import torch
from models import Free, assert_close, weights
from ranks import run
from torch import nn

import zero_torch as zero

STAGES = (0, 1, 2, 3)


def _accumulate_by_hand(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Free(w=torch.ones(1))
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
        for micro in range(3):
            (model.w * (3 * rank + micro + 1)).sum().backward()
        assert zero.full_grad(model.w).item() == 10.5
        opt.step()
        assert zero.full_param(model.w).item() == -9.5


def test_e02_three_backwards_without_telling_how_many() -> None:
    run(_accumulate_by_hand, 2)


def _global_steps(rank: int, world: int) -> None:
    def mlp() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))

    def data(step: int, micro: int, rank: int) -> torch.Tensor:
        seed = 100 * step + 10 * micro + rank
        return torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))

    reference = mlp()
    plain = torch.optim.SGD(reference.parameters(), lr=0.1)
    runs = {}
    for stage in STAGES:
        model = mlp()
        runs[stage] = (
            model,
            zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, min_unit_numel=0),
        )
    for step in range(3):
        for micro in range(4):
            losses = [reference(data(step, micro, r)).square().mean() for r in range(world)]
            (sum(losses) / world).backward()
        plain.step()
        plain.zero_grad()
        norms = set()
        for model, opt in runs.values():
            for micro in range(4):
                model(data(step, micro, rank)).square().mean().backward()
            norms.add(float(opt.grad_norm()))
            opt.step()
            opt.zero_grad()
            assert_close(weights(model), weights(reference))
        assert len(norms) == 1


def test_e03_accumulation_is_right_in_later_global_steps() -> None:
    run(_global_steps, 2)


def _no_sync_patterns(rank: int, world: int) -> None:
    for stage, dtype in itertools.product(STAGES, (torch.float32, torch.bfloat16)):
        for quiet in itertools.product((False, True), repeat=4):
            model = Free(w=torch.ones(1, dtype=dtype))
            opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
            for micro, is_quiet in enumerate(quiet):
                factor = (1, 2, 3, 0)[micro] if rank == 0 else (4, 5, 6, 0)[micro]
                with opt.no_sync() if is_quiet else contextlib.nullcontext():
                    (model.w * factor).sum().backward()
            assert zero.full_grad(model.w).item() == 10.5, (stage, dtype, quiet)


def test_e04_no_sync_in_any_order() -> None:
    run(_no_sync_patterns, 2)


def _kept_gradients(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Free(w=torch.ones(3))
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.0)
        for _ in range(3):
            model.w.sum().backward()
        assert zero.full_grad(model.w).tolist() == [3.0] * 3
        opt.zero_grad()
        for expected in (1.0, 2.0, 3.0):
            model.w.sum().backward()
            opt.step()
            assert zero.full_grad(model.w).tolist() == [expected] * 3


def test_e05_a_reduced_gradient_is_not_reduced_again() -> None:
    run(_kept_gradients, 2)


def _infinity_norm(rank: int, world: int) -> None:
    for stage in STAGES:
        # 16 elements of padding put the two on different ranks.
        model = Free(a=torch.zeros(1), b=torch.zeros(1))
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
        (3 * model.a - 4 * model.b).sum().backward()
        assert float(opt.clip_grad_norm_(1.0, norm_type=float("inf"))) == 4.0
        assert abs(zero.full_grad(model.a).item() - 0.75) < 1e-6
        assert abs(zero.full_grad(model.b).item() + 1.0) < 1e-6


def test_e07_infinity_norm() -> None:
    run(_infinity_norm, 2)


def _one_element(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Free(w=torch.zeros(1))
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
        assert float(opt.clip_grad_norm_(1.0)) == 0.0  # no gradient anywhere
        opt.step()
        (model.w * 5).sum().backward()
        assert float(opt.clip_grad_norm_(1.0)) == 5.0
        assert abs(zero.full_grad(model.w).item() - 1.0) < 1e-6


@pytest.mark.parametrize("world", [2, 3])
def test_e08_a_rank_without_a_share_takes_part(world: int) -> None:
    run(_one_element, world)


def _norms(rank: int, world: int) -> list[float]:
    norms = []
    for stage in STAGES:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
        model[2].weight = model[0].weight  # tied: counted once
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-3, min_unit_numel=0)
        model(torch.arange(7)).square().sum().backward()
        norms.append(float(opt.grad_norm()))
    return norms


def test_e10_a_gradient_is_counted_once() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 5), nn.Linear(5, 5), nn.Linear(5, 7, bias=False))
    model[2].weight = model[0].weight
    model(torch.arange(7)).square().sum().backward()
    want = nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    got = {norm for world in (1, 2, 3) for norms in run(_norms, world) for norm in norms}
    assert len(got) == 1
    assert abs(got.pop() - want) <= 1e-6 * want


def _used_on_one_rank(rank: int, world: int) -> list[list[float]]:
    seen = []
    for stage in STAGES:
        model = Free(trunk=torch.ones(2), head=torch.ones(2))
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        (model.trunk + model.head if rank == 1 else model.trunk).sum().backward()
        assert model.head.grad is not None
        assert zero.full_grad(model.head).tolist() == [0.5, 0.5]
        opt.step()
        opt.zero_grad()
        seen += [zero.full_param(p).tolist() for p in (model.trunk, model.head)]
        (model.trunk + model.head).sum().backward()
        assert zero.full_grad(model.head).tolist() == [1.0, 1.0]
        opt.step()
        seen += [zero.full_param(p).tolist() for p in (model.trunk, model.head)]
    return seen


def test_e13_a_parameter_used_on_one_rank_only() -> None:
    first, second = run(_used_on_one_rank, 2)
    assert first == second


def _step_counts(rank: int, world: int) -> None:
    for stage, bucket in itertools.product(STAGES, (64, 25 * 2**20)):
        model = Free(a=torch.ones(1), b=torch.ones(1))
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, weight_decay=0.1, bucket_bytes=bucket)
        for i in range(1, 6):
            loss = model.a * i
            if i % 2:
                loss = loss + model.b * 2 * i
            loss.sum().backward()
            opt.step()
            opt.zero_grad()
        assert abs(zero.full_param(model.a).item() - 0.475581) < 1e-6
        assert abs(zero.full_param(model.b).item() - 0.689524) < 1e-6
        assert zero.full_state(model.a)["step"].item() == 5
        assert zero.full_state(model.b)["step"].item() == 3


def test_e17_step_counts_are_each_parameters_own() -> None:
    run(_step_counts, 2)


def _small_inner_parameter(rank: int, world: int) -> None:
    class Scaled(nn.Module):
        def __init__(self, shape: tuple[int, ...]) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full(shape, 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    for stage, shape in itertools.product(STAGES, ((1,), (2,), (1, 1))):

        def build(shape: tuple[int, ...] = shape) -> nn.Module:
            torch.manual_seed(0)
            return nn.Sequential(nn.Linear(2, 2), nn.Sequential(Scaled(shape)))

        model, reference = build(), build()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, units=[Scaled], min_unit_numel=0)
        plain = torch.optim.AdamW(reference.parameters(), lr=0.1)
        for step in range(4):
            x = torch.full((3, 2), float(step + 1))
            model(x).square().sum().backward()
            reference(x).square().sum().backward()
            got = zero.full_grad(model[1][0].scale)
            torch.testing.assert_close(got, reference[1][0].scale.grad, rtol=1e-5, atol=1e-6)
            opt.step()
            opt.zero_grad()
            plain.step()
            plain.zero_grad()
        assert_close(weights(model), weights(reference), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world", [1, 2])
def test_e24_small_parameters_train(world: int) -> None:
    run(_small_inner_parameter, world)


def _different_starts(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Free(w=torch.full((2,), 1.0 + rank))
        model.register_buffer("b", torch.tensor(10 + rank))
        frozen = nn.Parameter(torch.full((3,), 5.0 + rank), requires_grad=False)
        model.register_parameter("frozen", frozen)
        zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        assert zero.full_param(model.w).tolist() == [1.0, 1.0]
        assert model.b.item() == 10
        assert zero.full_param(model.frozen).tolist() == [5.0] * 3


def test_e64_rank_0s_values_are_everywhere() -> None:
    run(_different_starts, 2)


def _message(build: Callable[[], object]) -> str:
    with pytest.raises(ValueError, match="rank") as caught:
        build()
    return str(caught.value)


def _other_order(rank: int, world: int) -> None:
    for stage in STAGES:
        a, b = torch.ones(2), torch.full((2,), 5.0)
        model = Free(a=a, b=b) if rank == 0 else Free(b=b, a=a)
        message = _message(lambda m=model, s=stage: zero.ZeroOptimizer(m, stage=s, lr=0.1))
        assert "order" in message
        assert "'a'" in message and "'b'" in message
        assert "rank 0" in message and "rank 1" in message


def test_e69_another_order_is_named() -> None:
    run(_other_order, 2)
