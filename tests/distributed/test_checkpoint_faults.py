"""Checkpoints that don't fit, are damaged or can't be written: all ranks raise, nothing is lost."""

from __future__ import annotations

import os
import resource
import signal
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import assert_equal, mlp, mlp_loss, shard
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero


@in_folder
def _names(rank: int, world: int, stage: int, folder: str) -> None:
    model = mlp()
    opt = shard(model, stage)
    zero.save(folder, model, opt)
    torch.manual_seed(1)
    other = nn.Sequential(
        nn.Linear(5, 18), nn.Tanh(), nn.Linear(18, 7), nn.Linear(7, 3, bias=False)
    )
    other.add_module("more", nn.Linear(1, 1))
    before = {n: p.detach().clone() for n, p in other.named_parameters()}
    other_opt = shard(other, stage)
    with pytest.raises(ValueError, match=r"missing: 'more.bias', 'more.weight'.*'3.bias'.*\[19\]"):
        zero.load(folder, other)
    with pytest.raises(ValueError, match="param group 0"):
        zero.load(folder, other, other_opt)
    values = {name: zero.full_param(p) for name, p in other.named_parameters()}
    assert_equal(values, before)
    with pytest.raises(ValueError, match="there is no directory"):
        zero.load(folder + "/nothing", model, opt)
    wide = nn.Sequential(*mlp().children())
    wide.add_module("more", nn.Linear(1, 1))
    wide_opt = shard(wide, stage)
    zero.load(folder, wide, strict=False)
    assert torch.equal(zero.full_param(wide[0].weight), zero.full_param(model[0].weight))
    adam = zero.ZeroOptimizer(mlp(), "adam", stage=stage, lr=0.1, min_unit_numel=0)
    mlp_loss(model, rank).backward()
    opt.step()
    momentum = mlp()
    momentum_opt = shard(momentum, stage, momentum=0.9)
    mlp_loss(momentum, rank).backward()
    momentum_opt.step()
    zero.save(folder, momentum, momentum_opt)
    with pytest.raises(ValueError, match="momentum_buffer"):
        zero.load(folder, *_of(adam))
    del wide_opt


def _of(opt: zero.ZeroOptimizer) -> tuple[nn.Module, zero.ZeroOptimizer]:
    model = mlp()
    return model, zero.ZeroOptimizer(model, "adam", stage=opt._live.options.stage, lr=0.1)


@in_folder
def _damage(rank: int, world: int, stage: int, folder: str) -> None:
    """A file that is cut, changed or gone is named on all ranks; nothing is changed."""
    model, opt = make(stage)
    train(model, opt, rank, range(2))
    zero.save(folder, model, opt)
    before = whole(model, opt)
    files = sorted(Path(folder).glob("*.safetensors"))
    for file in (files[0], files[-1]):
        content = file.read_bytes()
        flipped = bytearray(content)
        flipped[-3] ^= 4
        for damaged in (content[:-8], bytes(flipped), None):
            dist.barrier()
            if rank == 0:
                file.unlink()
                if damaged is not None:
                    file.write_bytes(damaged)
            dist.barrier()
            with pytest.raises((ValueError, RuntimeError), match=file.name):
                zero.load(folder, model, opt)
            assert_equal(whole(model, opt), before)
        dist.barrier()
        if rank == 0:
            file.write_bytes(content)
        dist.barrier()
    zero.load(folder, model, opt)
    dist.barrier()
    if rank == 0:  # E58: users delete what is large
        for file in Path(folder).glob("optimizer-*"):
            file.unlink()
    dist.barrier()
    zero.load(folder, model)
    with pytest.raises((ValueError, RuntimeError), match="optimizer-"):
        zero.load(folder, model, opt)


@in_folder
def _full_disk(rank: int, world: int, stage: int, folder: str) -> None:
    """One rank can't write: all raise, and the old checkpoint is still there."""
    model, opt = make(stage)
    train(model, opt, rank, range(1))
    zero.save(folder, model, opt, extra="old")
    before = whole(model, opt)
    train(model, opt, rank, range(1, 2))
    files = sorted(os.listdir(folder))
    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(RuntimeError, match=r"safetensors"):
            zero.save(folder, model, opt, extra="new")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    dist.barrier()
    assert sorted(os.listdir(folder)) == files
    assert zero.load(folder, model, opt) == "old"
    assert_equal(whole(model, opt), before)
    zero.save(folder, model, opt, extra="new")
    assert zero.load(folder, model, opt) == "new"


@in_folder
def _apart(rank: int, world: int, stage: int, folder: str) -> None:
    """Each rank has a disk of its own."""
    model, opt = make(stage)
    own = f"{folder}/{rank}/c"
    for save in (zero.save, lambda *given: zero.async_save(*given).wait()):
        with pytest.raises((ValueError, RuntimeError), match="a file system that they share"):
            save(own, model, opt)
    assert not os.path.exists(f"{folder}/0/c/manifest.json")


def test_ranks_without_a_common_file_system() -> None:
    run(at_each_stage, 2, _apart)


def test_names_and_rules_that_do_not_fit() -> None:
    run(at_each_stage, 2, _names)


def test_e51_e58_damaged_and_missing_files_are_named() -> None:
    run(at_each_stage, 2, _damage)


def test_a_rank_that_cannot_write_leaves_the_old_checkpoint() -> None:
    run(at_each_stage, 2, _full_disk)


def test_a_plain_model(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    zero.save(tmp_path / "c", model, extra=[1, 2])
    other = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    assert zero.load(tmp_path / "c", other) == [1, 2]
    assert_equal(dict(other.state_dict()), dict(model.state_dict()))
    opt = zero.ZeroOptimizer(other, stage=0)
    with pytest.raises(ValueError, match="saved without one"):
        zero.load(tmp_path / "c", other, opt)
    del opt
    sharded = zero.ZeroModule(other, stage=3)
    zero.save(tmp_path / "d", sharded)
    zero.load(tmp_path / "d", model)
