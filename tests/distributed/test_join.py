"""Uneven data: ranks whose batches end at different steps (zero.join)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from join_cases import Plan, check, reference
from models import GPT, mlp, mlp_loss
from ranks import at_each_stage, run

import zero_torch as zero

PLANS: dict[str, dict[str, Any]] = {
    "plain": {},
    "all": {"over": "all"},
    "clip": {"clip": 0.05},
    "no_sync": {"micro": 2},
    "adamw": {"rule": "adamw", "clip": 0.5},
    "foreign": {"rule": torch.optim.RMSprop, "over": "all"},
}


def _train_all(rank: int, world: int, batches: tuple[int, ...]) -> list[Any]:
    results = []
    for name, settings in PLANS.items():
        for stage in range(4):
            plan = Plan(batches, stage=stage, **settings)
            try:
                results.append([w.numpy() for w in check(plan, rank)])
            except Exception as error:
                raise AssertionError(f"{name} at stage {stage}: {error}") from error
    return results


@pytest.mark.parametrize("batches", [(1, 4), (3, 0), (2, 5, 3), (0, 4, 0), (2, 2)])
def test_weights_are_those_of_one_process(batches: tuple[int, ...]) -> None:
    ranks = run(_train_all, len(batches), batches)
    for other in ranks[1:]:
        for mine, theirs in zip(ranks[0], other, strict=True):
            assert all((a == b).all() for a, b in zip(mine, theirs, strict=True))


def _gpt_loss(model: torch.nn.Module, rank: int, step: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(0, 53, (2, 9), generator=generator)
    return torch.nn.functional.cross_entropy(
        model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()
    )


def _gpt() -> GPT:
    torch.manual_seed(3)
    return GPT()


def _trains_gpt(rank: int, world: int, stage: int) -> None:
    check(Plan((1, 3), stage=stage, model=_gpt, loss=_gpt_loss, clip=1.0), rank, atol=1e-5)


def test_tied_weights_and_blocks() -> None:
    run(at_each_stage, 2, _trains_gpt)


def _same_everywhere(opt: zero.ZeroOptimizer, world: int) -> None:
    """States and weights have the same bits on all ranks."""
    state = opt.state_dict()["state"]
    flat = [v.double().flatten() for s in state.values() for v in s.values()]
    flat += [zero.full_param(p).double().flatten() for g in opt.param_groups for p in g["params"]]
    own = torch.cat(flat)
    every = [torch.empty_like(own) for _ in range(world)]
    torch.distributed.all_gather(every, own)
    assert all(torch.equal(own, other) for other in every)


def _scheduled(rank: int, world: int, stage: int) -> None:
    """A rank whose scheduler stands still steps with the others' learning rate."""
    for rule in ("adamw", torch.optim.AdamW):
        model = mlp()
        opt = zero.ZeroOptimizer(model, rule, stage=stage, lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(opt, 1, gamma=0.5)
        with zero.join(opt):
            for step in range(4 if rank == 1 else 1):
                mlp_loss(model, rank, step).backward()
                opt.step()
                schedule.step()
                opt.zero_grad()
        assert opt.param_groups[0]["lr"] == 0.05 * 0.5 ** (4 if rank == 1 else 1)
        _same_everywhere(opt, world)
        plain = mlp()
        other = torch.optim.AdamW(plain.parameters(), lr=0.05)
        for step in range(4):
            gradients = []
            for r in [0, 1] if step == 0 else [1]:
                other.zero_grad()
                mlp_loss(plain, r, step).backward()
                gradients.append([p.grad for p in plain.parameters()])
            for p, *parts in zip(plain.parameters(), *gradients, strict=True):
                p.grad = sum(parts) / len(parts)
            other.param_groups[0]["lr"] = 0.05 * 0.5**step
            other.step()
        for p, q in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(zero.full_param(p), q.detach(), rtol=1e-4, atol=1e-4)


def test_hyperparameters_are_those_of_active_ranks() -> None:
    run(at_each_stage, 2, _scheduled)


def _sgd(stage: int, **settings: Any) -> tuple[torch.nn.Module, zero.ZeroOptimizer]:
    model = mlp()
    return model, zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, **settings)


def _against(
    opt: zero.ZeroOptimizer, model: torch.nn.Module, gradients: Callable[[Any, int], Any]
) -> None:
    """The weights are those of plain SGD with ``gradients(model, step)`` until it gives None."""
    plain, step = mlp(), 0
    while (given := gradients(plain, step)) is not None:
        with torch.no_grad():
            for p, g in zip(plain.parameters(), given, strict=True):
                p -= 0.1 * g
        step += 1
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero.full_param(p), q.detach(), rtol=1e-5, atol=1e-6)


def _grads(model: torch.nn.Module, *batches: tuple[int, int]) -> list[torch.Tensor]:
    """Of the sum of (rank, step) batches' losses."""
    model.zero_grad()
    sum(mlp_loss(model, *batch) for batch in batches).backward()  # type: ignore[union-attr]
    return [p.grad.clone() for p in model.parameters()]  # type: ignore[union-attr]


def _accumulates(rank: int, world: int, stage: int) -> None:
    """Two reducing backwards a step; rank 1 ends between them; zeros instead of None."""
    model, opt = _sgd(stage)
    with zero.join(opt):
        for batch in range(3 if rank == 1 else 4):
            mlp_loss(model, rank, batch).backward()
            if batch % 2 == 1:
                opt.step()
                opt.zero_grad(set_to_none=False)

    def gradients(plain: Any, step: int) -> Any:
        if step == 0:
            return [g / 2 for g in _grads(plain, (0, 0), (1, 0), (0, 1), (1, 1))]
        if step == 1:
            both, last = _grads(plain, (0, 2), (1, 2)), _grads(plain, (0, 3))
            return [g / 2 + h for g, h in zip(both, last, strict=True)]
        return None

    _against(opt, model, gradients)


def _drops_gradients(rank: int, world: int, stage: int) -> None:
    """Gradients that the active rank lets go of, by the model, are gone on all."""
    model, opt = _sgd(stage)
    with zero.join(opt):
        for batch in range(1 if rank == 1 else 3):
            mlp_loss(model, rank, batch).backward()
            if batch != 1:
                opt.step()
            model.zero_grad()

    def gradients(plain: Any, step: int) -> Any:
        if step == 0:
            return [g / 2 for g in _grads(plain, (0, 0), (1, 0))]
        return _grads(plain, (0, 2)) if step == 1 else None

    _against(opt, model, gradients)
    assert all(p.grad is None for p in model.parameters())


def _sums(rank: int, world: int, stage: int) -> None:
    model, opt = _sgd(stage, average=False)
    with zero.join(opt):
        for batch in range(1 if rank == 1 else 2):
            mlp_loss(model, rank, batch).backward()
            assert float(opt.grad_norm()) > 0
            opt.clip_grad_value_(0.5)
            opt.step()
            opt.zero_grad()

    def gradients(plain: Any, step: int) -> Any:
        batches = [(0, 0), (1, 0)] if step == 0 else [(0, 1)]
        return [g.clamp(-0.5, 0.5) for g in _grads(plain, *batches)] if step < 2 else None

    _against(opt, model, gradients)


def _overflows(rank: int, world: int, stage: int) -> None:
    """A step that is left out is left out on all ranks, and errors are the active ranks'."""
    for mode in ("skip", "raise"):
        model, opt = _sgd(stage, on_nonfinite=mode)
        with zero.join(opt):
            for batch in range(1 if rank == 1 else 3):
                scale = float("inf") if batch == 1 else 1.0
                (mlp_loss(model, rank, batch) * scale).backward()
                if batch == 1:
                    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
                        opt.clip_grad_norm_(1.0, error_if_nonfinite=True)
                if batch == 1 and mode == "raise":
                    with pytest.raises(RuntimeError, match="on_nonfinite"):
                        opt.step()
                else:
                    opt.step()
                opt.zero_grad()
        assert zero.report(opt).steps == 2

        def gradients(plain: Any, step: int) -> Any:
            if step == 0:
                return [g / 2 for g in _grads(plain, (0, 0), (1, 0))]
            return _grads(plain, (0, 2)) if step == 1 else None

        _against(opt, model, gradients)


def test_ways_to_train() -> None:
    run(at_each_stage, 2, _accumulates, _drops_gradients, _sums, _overflows)


def _rank_1_ends_first(plain: Any, step: int) -> Any:
    """Of three steps of rank 0, the first with rank 1: the means."""
    if step == 0:
        return [g / 2 for g in _grads(plain, (0, 0), (1, 0))]
    return _grads(plain, (0, step)) if step < 3 else None


def _several(rank: int, world: int, stage: int) -> None:
    first, of_first = _sgd(stage)
    second, of_second = _sgd(3 - stage)
    with zero.join([of_first, of_second]):
        for batch in range(1 if rank == 1 else 3):
            (mlp_loss(first, rank, batch) + mlp_loss(second, rank, batch)).backward()
            for opt in (of_first, of_second):
                opt.step()
                opt.zero_grad()

    _against(of_first, first, _rank_1_ends_first)
    _against(of_second, second, _rank_1_ends_first)


def _goes_on(rank: int, world: int, stage: int) -> None:
    """Training outside, a join without steps, with even data, and again outside."""
    model, opt = _sgd(stage)
    with zero.join(opt):
        pass
    with zero.join(opt, average_over="all"):
        for batch in range(2 if rank == 1 else 1):
            mlp_loss(model, rank, batch).backward()
            opt.step()
            opt.zero_grad()
            with zero.gathered(model):
                assert all(torch.isfinite(p).all() for p in model.parameters())
    mlp_loss(model, rank, 2).backward()
    opt.step()

    def gradients(plain: Any, step: int) -> Any:
        if step == 1:
            return [g / 2 for g in _grads(plain, (1, 1))]
        return [g / 2 for g in _grads(plain, (0, step), (1, step))] if step < 3 else None

    _against(opt, model, gradients)


def _learns(rank: int, world: int, stage: int) -> None:
    """Training goes on after a join in which one rank had no batch, or no step was taken."""
    model, opt = (
        _sgd(stage, units=[torch.nn.Linear], min_unit_numel=0) if stage == 3 else _sgd(stage)
    )
    with zero.join(opt):
        for batch in range(2 * (rank == 0)):
            mlp_loss(model, rank, batch).backward()
            opt.step()
            opt.zero_grad()
    with zero.join(opt):
        if rank == 1:
            mlp_loss(model, rank, 0).detach()
    for batch in (2, 3):
        mlp_loss(model, rank, batch).backward()
        opt.step()
        opt.zero_grad()

    def gradients(plain: Any, step: int) -> Any:
        if step < 2:
            return _grads(plain, (0, step))
        return [g / 2 for g in _grads(plain, (0, step), (1, step))] if step < 4 else None

    _against(opt, model, gradients)


def test_several_optimizers_and_what_comes_after() -> None:
    run(at_each_stage, 2, _several, _goes_on, _learns)


def _in_bfloat16(rank: int, world: int, stage: int) -> None:
    """Masters have the same bits on all ranks, near those of fp32."""
    plan = Plan((1, 3), stage=stage)
    model = mlp()
    opt = zero.ZeroOptimizer(
        model, "sgd", stage=stage, lr=0.1, momentum=0.9, param_dtype=torch.bfloat16
    )
    with zero.join(opt):
        for batch in range(plan.batches[rank]):
            generator = torch.Generator().manual_seed(10 * batch + rank)
            x = torch.randn(4, 5, generator=generator)
            model(x.bfloat16()).float().square().mean().backward()
            opt.step()
            opt.zero_grad()
    _same_everywhere(opt, world)
    for p, q in zip(model.parameters(), reference(plan), strict=True):
        torch.testing.assert_close(zero.full_param(p), q, rtol=0.05, atol=0.01)


def _over_group(rank: int, world: int, stage: int) -> None:
    model, opt = _sgd(stage, transport="group")
    with zero.join(opt):
        for batch in range(1 if rank == 1 else 3):
            mlp_loss(model, rank, batch).backward()
            opt.step()
            opt.zero_grad()

    _against(opt, model, _rank_1_ends_first)


def test_mixed_precision_and_the_group_transport() -> None:
    run(at_each_stage, 2, _in_bfloat16, _over_group)
