"""Joins that go wrong, and loops of different length without one: errors, never hangs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

import pytest
import torch
from models import mlp, mlp_loss
from ranks import run
from torch import nn

import zero_torch as zero

TRANSPORTS = ("host", "group")
TIMEOUT = 4.0


def _make(stage: int, transport: str = "auto") -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = mlp()
    units = {"units": [nn.Linear], "min_unit_numel": 0} if stage == 3 else {}
    return model, zero.ZeroOptimizer(
        model, "adamw", stage=stage, lr=0.1, transport=transport, timeout=TIMEOUT, **units
    )


def _step(model: nn.Module, opt: zero.ZeroOptimizer, rank: int, step: int = 0) -> None:
    mlp_loss(model, rank, step).backward()
    opt.step()
    opt.zero_grad()


def _message(action: Callable[[], object]) -> str:
    began = time.monotonic()
    with pytest.raises(Exception, match="rank") as caught:
        action()
    assert time.monotonic() - began < 2.5 * TIMEOUT
    return str(caught.value)


def _without(rank: int, world: int, transport: str, stage: int, then: str) -> None:
    model, opt = _make(stage, transport)

    def loop(steps: int) -> None:
        for step in range(steps):
            _step(model, opt, rank, step)

    if rank == 0:
        message = _message(lambda: loop(3))
        assert "rank 1" in message and "zero.join" in message, message
        says = ["closed its", "died", "did not take part", "ranks disagree"]
        assert any(text in message for text in says), message
        return
    loop(2)
    if then == "exit":
        # This rank's result reaches the test, its process is gone.
        return
    if then == "drop":
        del model, opt, loop
    time.sleep(2 * TIMEOUT)


@pytest.mark.parametrize("then", ["exit", "drop", "idle"])
@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_loop_that_ends_early_is_an_error_that_names_the_rank(
    transport: str, stage: int, then: str
) -> None:
    run(_without, 2, transport, stage, then, limit_s=60)


def _raises(rank: int, world: int, transport: str, where: str) -> None:
    for stage in range(4):
        model, opt = _make(stage, transport)

        def body(
            stage: int = stage, model: nn.Module = model, opt: zero.ZeroOptimizer = opt
        ) -> None:
            with zero.join(opt):
                for step in range(1 if rank == 2 else 4):
                    if rank == 1 and step == 2:
                        if where == "backward":
                            handle = next(model.parameters()).register_hook(_boom)
                            try:
                                mlp_loss(model, rank, step).backward()
                            finally:
                                handle.remove()
                        raise RuntimeError("boom on rank 1")
                    _step(model, opt, rank, step)

        message = _message(body)
        assert "rank 1" in message, (stage, message)
        if rank == 1 or where == "body":
            assert "boom on rank 1" in message or "the end by an exception" in message, message


def _boom(gradient: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("boom on rank 1")


@pytest.mark.parametrize("where", ["body", "backward"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_exception_in_one_body_reaches_all(transport: str, where: str) -> None:
    run(_raises, 3, transport, where, limit_s=90)


def _dies(rank: int, world: int, transport: str) -> None:
    model, opt = _make(2, transport)

    def body() -> None:
        with zero.join(opt):
            for step in range(1 if rank == 0 else 3):
                if rank == 1 and step == 2:
                    os._exit(3)
                _step(model, opt, rank, step)

    raise RuntimeError("as it should be: " + _message(body))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_named(transport: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"as it should be: .*rank 1"):
        run(_dies, 2, transport, limit_s=60)


def _disagree(rank: int, world: int, transport: str) -> None:
    for stage in range(4):
        for early in (False, True):
            model, opt = _make(stage, transport)

            def body(
                model: nn.Module = model, opt: zero.ZeroOptimizer = opt, early: bool = early
            ) -> None:
                with zero.join(opt):
                    if rank == 2:
                        return
                    if rank == 0 or not early:
                        mlp_loss(model, rank).backward()
                    if rank == 0:
                        opt.clip_grad_norm_(1.0)
                    opt.step()

            message = _message(body)
            parts = ["rank 0", "rank 1"]
            if stage < 3 or not early:  # else rank 0 waits for a gather, and rank 1 for it
                parts += ["a backward" if early else "clip_grad_norm_", "step"]
            if stage == 3 and early:
                continue
            if rank < 2 or transport == "group":
                assert all(part in message for part in parts), (stage, early, message)
            assert not opt._live.joining()
            opt.zero_grad()
            _step(model, opt, rank)  # goes on
            for p in model.parameters():
                whole = zero.full_param(p)
                every = [torch.empty_like(whole) for _ in range(world)]
                torch.distributed.all_gather(every, whole)
                assert all(torch.equal(whole, other) for other in every)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_active_ranks_that_do_different_things_are_named_with_both(transport: str) -> None:
    run(_disagree, 3, transport, limit_s=90)


def _refused(rank: int, world: int) -> None:
    actions = {
        "full_param": lambda model, opt: zero.full_param(next(model.parameters())),
        "state_dict": lambda model, opt: opt.state_dict(),
        "load_state_dict": lambda model, opt: zero.load_state_dict(opt, opt_state),
        "add_param_group": lambda model, opt: opt.add_param_group(
            {"params": [nn.Parameter(torch.ones(3))]}
        ),
        "writeback": _writes,
    }
    opt_state = {"state": {}, "param_groups": []}
    for stage in range(4):
        for name, action in actions.items():
            if stage == 0 and name in ("full_param", "state_dict"):
                continue  # needs nobody
            model, opt = _make(stage)
            if name in ("state_dict", "load_state_dict"):
                _step(model, opt, rank)
            with zero.join(opt):
                for step in range(1 + 2 * (rank == 0)):
                    _step(model, opt, rank, step)
                    if step < 2:
                        continue
                    message = _message(lambda: action(model, opt))
                    assert "zero.join" in message and "rank 1" in message, (name, stage, message)
                    assert "after the join" in message, (name, stage, message)
            whole = [zero.full_param(p) for p in model.parameters()]  # the join ended well
            assert all(torch.isfinite(w).all() for w in whole)


def _writes(model: nn.Module, opt: zero.ZeroOptimizer) -> None:
    with zero.gathered(model, writeback=True):
        pass


def test_what_needs_all_ranks_is_refused_by_name() -> None:
    run(_refused, 2, limit_s=90)


def _scaler(rank: int, world: int) -> None:
    for stage in range(4):
        model, opt = _make(stage)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)

        def body(
            model: nn.Module = model,
            opt: zero.ZeroOptimizer = opt,
            scaler: torch.amp.GradScaler = scaler,
        ) -> None:
            with zero.join(opt):
                scaler.scale(mlp_loss(model, rank)).backward()
                scaler.step(opt)

        with pytest.raises(NotImplementedError, match=r"GradScaler inside zero\.join"):
            body()
        assert not opt._live.joining()


def test_grad_scaler_is_refused() -> None:
    run(_scaler, 2, limit_s=60)


def _edits(rank: int, world: int) -> None:
    for stage in (1, 2, 3):
        model, opt = _make(stage)
        parameter = next(model.parameters())
        with zero.join(opt):
            mlp_loss(model, rank).backward()
            with pytest.raises(NotImplementedError, match=r"0\.weight.*zero\.join"):
                parameter.grad.mul_(0.5)


def test_edits_of_sharded_gradients_are_refused() -> None:
    run(_edits, 2, limit_s=60)


def _arguments(rank: int, world: int) -> None:
    model, opt = _make(1)
    with pytest.raises(ValueError, match='expected average_over to be "active" or "all"'):
        zero.join(opt, average_over="some").__enter__()
    with pytest.raises(TypeError, match="expected a ZeroOptimizer"):
        zero.join(model).__enter__()  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="expected an optimizer"):
        zero.join([]).__enter__()
    with zero.join(opt):
        with pytest.raises(ValueError, match="inside another"), zero.join(opt):
            pass
        _step(model, opt, rank)
    with pytest.raises(ValueError, match=r"average_over on all ranks.*on rank 1"):
        zero.join(opt, average_over="all" if rank == 1 else "active").__enter__()
    with zero.join(opt):
        _step(model, opt, rank)


def test_wrong_arguments_are_refused() -> None:
    run(_arguments, 2, limit_s=60)
