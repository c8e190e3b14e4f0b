"""Ranks that part ways: an error with names on every rank, never a hang."""

from __future__ import annotations

import os
import time

import pytest
import torch
from ranks import run
from torch import nn

import zero_torch as zero

TRANSPORTS = ("host", "group")


def _message(action: object) -> str:
    with pytest.raises(Exception, match="rank") as caught:
        action()  # type: ignore[operator]
    return str(caught.value)


def _skips_backward(rank: int, world: int, transport: str) -> list[str]:
    messages = []
    for stage in (0, 1, 2, 3):
        model = nn.Linear(3, 3)
        config = zero.ZeroConfig(transport=transport, timeout=10.0)
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, config=config)

        def step(skip: bool, model: nn.Module = model, opt: zero.ZeroOptimizer = opt) -> None:
            loss = model(torch.ones(1, 3)).sum()
            if not skip:
                loss.backward()
            opt.step()
            opt.zero_grad()

        step(skip=False)
        opt.synchronize()

        def goes_on(step: object = step) -> None:
            step(skip=rank == 1)  # type: ignore[operator]
            step(skip=False)  # type: ignore[operator]

        messages.append(_message(goes_on))
    return messages


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_e30_a_rank_that_skips_a_backward(transport: str) -> None:
    for messages in run(_skips_backward, 2, transport, limit_s=60):
        for message in messages:
            assert "rank 0" in message and "rank 1" in message, message
            assert "bucket 0 (" in message, message


def _dies(rank: int, world: int, transport: str) -> str | None:
    model = nn.Linear(3, 3)
    config = zero.ZeroConfig(transport=transport, timeout=20.0)
    opt = zero.ZeroOptimizer(model, stage=2, lr=0.1, config=config)
    if rank == 1:
        os._exit(3)
    began = time.monotonic()
    message = _message(lambda: model(torch.ones(1, 3)).sum().backward())
    assert time.monotonic() - began < 20.0
    later = _message(opt.step)
    assert ("earlier failure" if transport == "group" else "died during") in later, later
    return message


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_rank_that_dies_is_named(transport: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"ranks \[1\] gave nothing"):
        run(_dies, 2, transport, limit_s=60)


def _reports_death(rank: int, world: int, transport: str) -> str:
    message = _dies(rank, world, transport)
    assert message is not None and "rank 1" in message, message
    raise RuntimeError("as it should be: " + message)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_dead_ranks_peer_says_who(transport: str) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"as it should be: .*rank 1"):
        run(_reports_death, 2, transport, limit_s=60)


def _late(rank: int, world: int, transport: str) -> str:
    model = nn.Linear(3, 3)
    config = zero.ZeroConfig(transport=transport, timeout=2.0)
    opt = zero.ZeroOptimizer(model, stage=1, lr=0.1, config=config)
    if rank == 1:
        time.sleep(6.0)
    return _message(lambda: (model(torch.ones(1, 3)).sum().backward(), opt.step()))


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_late_rank_is_a_timeout_that_names_it(transport: str) -> None:
    first, _ = run(_late, 2, transport, limit_s=60)
    assert "rank 1" in first and "within" in first


def _early_exit(rank: int, world: int) -> None:
    """Rank 0 returns right after its last step while rank 1 is still busy (E105)."""
    for stage in (0, 1, 2, 3):
        model = nn.Linear(3, 3)
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        model(torch.ones(1, 3)).sum().backward()
        if rank == 1:
            time.sleep(1.0)
        opt.step()
        assert torch.isfinite(zero.full_param(model.weight)).all()


def test_e105_an_early_finisher_breaks_nobody() -> None:
    run(_early_exit, 2)
