"""kill -9 at random moments of saving: what is on the disk is the old checkpoint or the new one."""

from __future__ import annotations

import contextlib
import multiprocessing
import random
import time
from pathlib import Path
from typing import Any

import torch
from ranks import start
from torch import nn

import zero_torch as zero

KILLS = 50


def _layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 63), nn.Linear(63, 7))


def _fill(model: nn.Module, opt: zero.ZeroOptimizer, value: int) -> None:
    """All weights, and with them the momenta of a step that changes no weight."""
    with zero.gathered(model, writeback=True), torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    sum(value * p.sum() for p in model.parameters()).backward()
    opt.step()
    opt.zero_grad()


def _save_for_ever(rank: int, world: int, folder: str, stage: int, saved: Any) -> None:
    model = _layers()
    opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.0, momentum=1.0, min_unit_numel=0)
    step = 0 if zero.latest(str(Path(folder).parent)) is None else zero.load(folder, model, opt)
    while True:
        step += 1
        _fill(model, opt, step)
        if step % 2:
            zero.save(folder, model, opt, extra=step)
        else:
            zero.async_save(folder, model, opt, extra=step).wait()
        if rank == 0:
            saved.send(step)


def _on_the_disk(folder: str) -> int:
    """The step that was saved, by weights, state and extra."""
    model = _layers()
    opt = zero.ZeroOptimizer(model, "sgd", stage=0, lr=0.0, momentum=1.0)
    step = zero.load(folder, model, opt)
    for parameter in model.parameters():
        assert torch.equal(parameter, torch.full_like(parameter, step))
        momentum = zero.full_state(parameter)["momentum_buffer"]
        assert torch.equal(momentum, torch.full_like(momentum, step * (step + 1) / 2))
    return step


def test_the_old_or_the_new_state_at_every_moment(tmp_path: Path) -> None:
    folder = str(tmp_path / "checkpoint")
    chance = random.Random(5)
    last = 0
    for kill in range(KILLS):
        ours, theirs = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        launch = start(_save_for_ever, 2, folder, kill % 4, theirs)
        theirs.close()
        assert ours.poll(60)
        begin = time.monotonic()
        last = ours.recv()
        while ours.poll(60) and last % 3:  # how long a save takes
            last = ours.recv()
        time.sleep(chance.uniform(0.0, 1.5) * max(0.01, (time.monotonic() - begin) / 2))
        launch.processes[chance.randrange(2)].kill()
        for rank in launch.processes:
            rank.kill()
            rank.join()
        with contextlib.suppress(EOFError):
            while ours.poll():
                last = ours.recv()
        step = _on_the_disk(folder)
        assert step in (last, last + 1), f"kill {kill}: {last} was saved, {step} is on the disk"
