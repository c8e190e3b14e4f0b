"""zero.async_save: what the model was at the call, written while training goes on."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import assert_equal
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero


@in_folder
def _goes_on(rank: int, world: int, stage: int, folder: str) -> None:
    """Steps, and even another save's, change nothing of what is on its way to the disk."""
    for at, given in enumerate(
        ({}, {"rule": torch.optim.NAdam}, {"param_dtype": torch.bfloat16, "rule": "sgd"})
    ):
        given = {**given, **({"momentum": 0.9} if given.get("rule") == "sgd" else {})}
        model, opt = make(stage, **given)
        model.register_buffer("count", torch.zeros(3))
        train(model, opt, rank, range(2))
        wanted = []
        for step in (2, 3, 4):
            wanted.append((whole(model, opt), model.count.clone()))
            save = zero.async_save(f"{folder}/{at}/step-{step}", model, opt, extra=step)
            assert save.directory == f"{folder}/{at}/step-{step}"
            model.count += 1
            train(model, opt, rank, range(step, step + 1))
        save.wait()
        assert save.done()
        save.wait()
        after = whole(model, opt)
        for step, (values, count) in zip((2, 3, 4), wanted, strict=True):
            assert zero.load(f"{folder}/{at}/step-{step}", model, opt) == step
            assert_equal(whole(model, opt), values)
            assert torch.equal(model.count, count)
            if step == 4:
                train(model, opt, rank, range(4, 5))
                assert_equal(whole(model, opt), after)


@contextlib.contextmanager
def _no_room(here: bool) -> Iterator[None]:
    """Files of this process end after 1000 bytes."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if here:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@in_folder
def _fails(rank: int, world: int, stage: int, folder: str) -> None:
    """Every rank hears of an error once: by wait(), or at the next call."""
    model, opt = make(stage)
    zero.async_save(folder, model, opt, extra="old")
    zero.save(folder, model, opt, extra="newer")  # one after the other
    train(model, opt, rank, range(1))
    files = sorted(os.listdir(folder))

    def failing() -> Any:
        dist.barrier()
        with _no_room(rank == 1):
            save = zero.async_save(folder, model, opt, extra="newest")
            if rank == 1:
                with pytest.raises(RuntimeError, match="safetensors"):
                    save.wait()
            dist.barrier()
        return save

    match = r"safetensors" if rank == 1 else r"failed on rank 1 \(this is rank 0"
    for seen in (True, False):
        save = failing()
        if seen:
            for _ in range(2):
                with pytest.raises(RuntimeError, match=match):
                    save.wait()
        else:  # rank 0 didn't wait
            with pytest.raises(RuntimeError, match=r"on rank|safetensors"):
                zero.load(folder, model, opt)
        dist.barrier()
        assert sorted(os.listdir(folder)) == files
        assert zero.load(folder, model, opt) == "newer"
        assert zero.latest(os.path.dirname(folder)) == folder
    zero.async_save(folder, model, opt, extra="last")
    assert zero.load(folder, model, opt) == "last"
    with pytest.raises(TypeError, match="extra"):
        zero.async_save(folder, model, opt, extra=object())
    with pytest.raises((ValueError, RuntimeError), match=r"manifest.json|directory"):
        zero.async_save(f"{folder}/manifest.json/x", model, opt)


def test_training_goes_on_meanwhile() -> None:
    run(at_each_stage, 2, _goes_on, limit_s=180.0)


def test_every_rank_hears_of_an_error() -> None:
    run(at_each_stage, 2, _fails, limit_s=180.0)


def _replicas(rank: int, world: int, folder: str) -> None:
    """Ranks of a grid talk in the background as well."""
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    model, opt = make(
        3, shard_group=groups[rank // 2], replicate_group=across[rank % 2], transport="group"
    )
    train(model, opt, rank, range(1))
    values = whole(model, opt)
    save = zero.async_save(folder, model, opt)
    train(model, opt, rank, range(1, 2))
    save.wait()
    zero.load(folder, model, opt)
    assert_equal(whole(model, opt), values)


def test_hybrid_sharding(tmp_path: Path) -> None:
    run(_replicas, 4, str(tmp_path / "c"))


SCRIPT = """
import sys, gc, resource, signal, torch, zero_torch as zero
if sys.argv[2] == "full":
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
for number in range(2):  # the first model is gone before its save has ended
    model = torch.nn.Linear(300, 300)
    opt = zero.ZeroOptimizer(model, stage=3)
    zero.async_save(sys.argv[1] + str(number), model, opt, extra="at the end")
    del model, opt
    gc.collect()
"""


def _run_script(folder: Path, how: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(folder), how],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def test_the_end_of_a_process_waits(tmp_path: Path) -> None:
    done = _run_script(tmp_path / "c", "")
    assert (done.returncode, done.stderr) == (0, "")
    for number in range(2):
        assert zero.load(tmp_path / f"c{number}", nn.Linear(300, 300)) == "at the end"
    failed = _run_script(tmp_path / "d", "full")
    for number in range(2):
        assert f"[zero.checkpoint] writing '{tmp_path}/d{number}/" in failed.stderr
    assert zero.latest(tmp_path) == str(tmp_path / "c1")
