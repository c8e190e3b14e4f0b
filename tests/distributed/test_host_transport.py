"""Ranks of one host through shared memory: the group's bits, and going on after errors."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import pytest
import torch
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from torch import nn

import zero_torch as zero


def _train(
    rank: int, stage: int, transport: str, steps: int, micros: int
) -> tuple[dict[str, torch.Tensor], list[float], str]:
    model = make_gpt()
    config = zero.ZeroConfig(
        transport=transport, bucket_bytes=4096, first_bucket_bytes=4096, timeout=30.0
    )
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, config=config)
    norms = []
    for step in range(steps):
        for micro in range(micros):
            loss_of(model, batch(step, rank, micro)).backward()
        norms.append(float(opt.clip_grad_norm_(0.5)))
        opt.step()
        opt.zero_grad()
    return weights(model), norms, zero.report(opt).transport


def _same_bits(rank: int, world: int) -> None:
    want = None
    for stage in (0, 1, 2, 3):
        for transport, name in (("group", "group"), ("host", "host"), ("auto", "host")):
            got, norms, described = _train(rank, stage, transport, steps=4, micros=2)
            assert described.startswith(name), described
            want = want or (got, norms)
            assert_equal(got, want[0])
            assert norms == want[1]


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_are_those_of_the_group(world: int) -> None:
    run(_same_bits, world)


class _OwnError(Exception):
    pass


class _Raises:
    """Makes a module of the model raise, in forward or in backward, while it is armed."""

    def __init__(self, module: nn.Module, where: str) -> None:
        self.armed = False
        self._where = where
        module.register_forward_hook(self._after_forward)

    def _after_forward(self, module: nn.Module, inputs: object, output: torch.Tensor) -> None:
        if self.armed and self._where == "forward":
            raise _OwnError
        if self.armed and self._where == "backward" and output.requires_grad:
            output.register_hook(self._raise)

    def _raise(self, gradient: torch.Tensor) -> None:
        raise _OwnError


def _with_failures(
    rank: int, stage: int, where: str, bad: Callable[[int, int], bool]
) -> tuple[dict[str, torch.Tensor], list[Exception]]:
    """Six steps on the same data, whatever fails in between; `bad(rank, attempt)` raises."""
    model = make_gpt()
    config = zero.ZeroConfig(bucket_bytes=4096, first_bucket_bytes=4096, timeout=20.0)
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, config=config)
    raises = _Raises(model.blocks[1], where)
    errors: list[Exception] = []
    done = attempt = 0
    while done < 6:
        raises.armed = bad(rank, attempt)
        attempt += 1
        assert attempt < 16, errors
        try:
            loss_of(model, batch(done, rank)).backward()
            opt.step()
            done += 1
        except (_OwnError, RuntimeError) as error:
            errors.append(error)
        opt.zero_grad()
    raises.armed = False
    return weights(model), errors


def _never(rank: int, attempt: int) -> bool:
    return False


def _one_rank(rank: int, attempt: int) -> bool:
    return rank == 1 and attempt in (0, 3, 4)


def _all_ranks(rank: int, attempt: int) -> bool:
    return attempt in (0, 3, 4)


def _goes_on(rank: int, world: int, stage: int, where: str) -> None:
    want, none = _with_failures(rank, stage, where, _never)
    assert none == []
    for bad in (_one_rank, _all_ranks):
        got, errors = _with_failures(rank, stage, where, bad)
        assert_equal(got, want)
        if bad is _one_rank:
            assert rank != 1 or [type(error) for error in errors] == [_OwnError] * 3
        for error in errors:
            told = f"its {where} was left by an exception" in str(error)
            assert told or isinstance(error, _OwnError), error


@pytest.mark.parametrize(("world", "stage"), [(2, 0), (2, 1), (3, 2), (2, 3), (3, 3)])
def test_an_error_in_backward_on_one_rank_or_on_all(world: int, stage: int) -> None:
    run(_goes_on, world, stage, "backward")


@pytest.mark.parametrize("world", [2, 3])
def test_an_error_in_forward_on_one_rank_or_on_all(world: int) -> None:
    run(_goes_on, world, 3, "forward")


def _keeps_gradients(rank: int, world: int) -> None:
    """What earlier backwards accumulated survives a forward that fails on one rank."""
    results = []
    for fails in (False, True):
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, timeout=20.0)
        raises = _Raises(model.blocks[1], "forward")
        loss_of(model, batch(0, rank)).backward()
        if fails:
            raises.armed = rank == 1
            with pytest.raises((_OwnError, RuntimeError)):
                loss_of(model, batch(1, rank)).backward()
            raises.armed = False
        loss_of(model, batch(2, rank)).backward()
        opt.step()
        results.append(weights(model))
    assert_equal(*results)


def test_a_failed_forward_keeps_what_was_accumulated() -> None:
    run(_keeps_gradients, 2)


def _different_steps(rank: int, world: int, stage: int) -> None:
    """A rank that leaves out a step can't be brought back, and both ranks are told."""
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, timeout=10.0)

    def iteration(skip: bool) -> None:
        loss_of(model, batch(0, rank)).backward()
        if not skip:
            opt.step()
        opt.zero_grad()

    iteration(skip=False)

    def error_of(attempt: int) -> str:
        try:
            iteration(skip=rank == 1 and attempt == 0)
        except RuntimeError as error:
            opt.zero_grad()
            return str(error)
        return ""

    errors = [error_of(attempt) for attempt in range(4)]
    assert any("ranks disagree" in text and "at step" in text for text in errors), errors
    assert any("different numbers of steps" in text for text in errors), errors


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_skips_a_step_is_told_so(stage: int) -> None:
    run(_different_steps, 2, stage)


def _killed(rank: int, world: int, stage: int) -> str | None:
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, timeout=60.0)
    loss_of(model, batch(0, rank)).backward()
    opt.step()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    began = time.monotonic()
    text = ""
    try:
        for step in range(3):
            loss_of(model, batch(step, rank)).backward()
            opt.step()
    except RuntimeError as error:
        text = str(error)
    assert time.monotonic() - began < 2.5
    assert "rank 1 (pid " in text and ") died during" in text, text
    with pytest.raises(RuntimeError, match=r"rank 1 \(pid \d+\) died during"):
        loss_of(model, batch(0, rank)).backward()
    raise RuntimeError("as it should be: " + text)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_killed_rank_is_named_with_its_pid(stage: int) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"as it should be: .*rank 1"):
        run(_killed, 2, stage, limit_s=60)


def _one_host_is_asked_for(rank: int, world: int) -> None:
    for transport in ("host", "group", "auto"):
        config = zero.ZeroConfig(transport=transport)
        report = zero.report(zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, config=config))
        assert report.transport.startswith("group" if transport == "group" else "host")
        assert f"transport {report.transport}" in str(report)


def test_the_transport_is_an_option_and_is_reported() -> None:
    run(_one_host_is_asked_for, 2)


def _different_choices(rank: int, world: int) -> None:
    config = zero.ZeroConfig(transport="host" if rank == 1 else "group", timeout=30.0)
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"got group on rank 0 and host on rank 1"):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, config=config)
    assert time.monotonic() - began < 10.0


def test_ranks_that_choose_different_transports_are_named() -> None:
    run(_different_choices, 2)
