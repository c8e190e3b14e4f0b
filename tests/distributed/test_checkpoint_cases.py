"""Cases of users of other systems that are about checkpoints: E32, E42, E51, E52, E53, E56, E58.

Adam's weights are compared with one process on all ranks' data, whose gradients have other
roundings: within 1e-6 of weights of about 1.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import Free, assert_close, assert_equal
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero
from zero_torch import _C

# E42: resume with another number of ranks


def _mlp() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 17), nn.Tanh(), nn.Linear(17, 7), nn.Tanh(), nn.Linear(7, 3))


def _loss(model: nn.Module, step: int, part: int, parts: int) -> torch.Tensor:
    """Of one of equal parts of a batch of 12 rows."""
    generator = torch.Generator().manual_seed(step)
    rows = torch.randn(12, 5, generator=generator).chunk(parts)[part]
    return model(rows).sub(1.0).square().mean()


def _alone(steps: range) -> list[tuple[float, dict[str, torch.Tensor]]]:
    """(loss, weights) after each step of torch's Adam in one process."""
    model = _mlp()
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)
    after = []
    for step in steps:
        opt.zero_grad()
        loss = _loss(model, step, 0, 1)
        loss.backward()
        opt.step()
        scheduler.step()
        after.append((loss.item(), {n: p.detach().clone() for n, p in model.named_parameters()}))
    return after


def _sharded(stage: int) -> tuple[nn.Module, zero.ZeroOptimizer, Any]:
    model = _mlp()
    opt = zero.ZeroOptimizer(model, "adam", stage=stage, lr=1e-2, min_unit_numel=0, timeout=30.0)
    return model, opt, torch.optim.lr_scheduler.StepLR(opt, 2, 0.5)


def _steps(rank: int, world: int, of: tuple[nn.Module, Any, Any], steps: range) -> None:
    model, opt, scheduler = of
    want = _alone(range(steps.stop))
    for step in steps:
        loss = _loss(model, step, rank, world)
        loss.backward()
        opt.step()
        opt.zero_grad()
        scheduler.step()
        mean = loss.detach().clone()
        if dist.is_initialized():
            dist.all_reduce(mean)
        torch.testing.assert_close(mean.item() / world, want[step][0], rtol=1e-6, atol=1e-6)
        got = {name: zero.full_param(p) for name, p in model.named_parameters()}
        assert_close(got, want[step][1], rtol=1e-6, atol=1e-6)


def _save_at_two(rank: int, world: int, folder: str) -> None:
    for stage in range(4):
        model, opt, scheduler = _sharded(stage)
        _steps(rank, world, (model, opt, scheduler), range(3))
        zero.save(f"{folder}/{stage}", model, opt, extra=scheduler.state_dict())
        values = whole(model, opt)
        if rank == 0:
            torch.save(values, f"{folder}/{stage}.pt")


def _resume(rank: int, world: int, folder: str) -> None:
    for saved, stage in ((0, 0), (1, 1), (2, 2), (3, 3), (3, 1)):
        model, opt, scheduler = _sharded(stage)
        scheduler.load_state_dict(zero.load(f"{folder}/{saved}", model, opt))
        assert_equal(whole(model, opt), torch.load(f"{folder}/{saved}.pt"))
        assert opt.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 5e-3
        assert {int(state["step"]) for state in opt.state_dict()["state"].values()} == {3}
        _steps(rank, world, (model, opt, scheduler), range(3, 6))


def test_e42_resume_with_another_number_of_ranks(tmp_path: Path) -> None:
    run(_save_at_two, 2, str(tmp_path))
    for world in (1, 3, 4):
        run(_resume, world, str(tmp_path))


# E32: saving on rank 0 only

# What needs all ranks, and what does not, by stage.
CALLS: dict[str, Any] = {
    "state_dict": lambda model, opt, folder: model.state_dict(),
    "optimizer.state_dict": lambda model, opt, folder: opt.state_dict(),
    "zero.state_dict": lambda model, opt, folder: zero.state_dict(model),
    "zero.optimizer_state_dict": lambda model, opt, folder: zero.optimizer_state_dict(opt),
    "zero.save": lambda model, opt, folder: zero.save(folder, model, opt),
}
LOCAL = {
    0: ("state_dict", "zero.state_dict", "optimizer.state_dict", "zero.optimizer_state_dict"),
    1: ("state_dict", "zero.state_dict"),
    2: ("state_dict", "zero.state_dict"),
    3: (),
}
COLLECTIVE = {
    0: ("zero.save",),
    1: ("optimizer.state_dict", "zero.save"),
    2: ("zero.optimizer_state_dict",),
    3: ("state_dict", "zero.state_dict"),
}
SENTENCE = {
    "state_dict": "state_dict is collective: call it on all ranks",
    "zero.state_dict": "state_dict is collective: call it on all ranks",
    "optimizer.state_dict": "optimizer.state_dict is collective: call it on all ranks",
    "zero.optimizer_state_dict": "optimizer.state_dict is collective: call it on all ranks",
    "zero.save": "save is collective: call it on all ranks",
}


def _on_rank_0(rank: int, world: int, transport: str, folder: str) -> None:
    for stage in range(4):
        settings: dict[str, Any] = {"stage": stage, "timeout": 30.0, "transport": transport}
        model = _mlp()
        opt = zero.ZeroOptimizer(model, lr=1e-2, min_unit_numel=0, **settings)
        _loss(model, 0, rank, world).backward()
        opt.step()
        if rank == 0:
            for name in LOCAL[stage]:
                assert CALLS[name](model, opt, folder)
        dist.barrier()
        for name in COLLECTIVE[stage]:
            del opt
            model = _mlp()
            opt = zero.ZeroOptimizer(
                model, lr=1e-2, min_unit_numel=0, **{**settings, "timeout": 1.5}
            )
            _loss(model, 0, rank, world).backward()
            opt.step()
            if rank == 0:
                began = time.monotonic()
                with pytest.raises(dist.DistBackendError, match=SENTENCE[name]) as raised:
                    CALLS[name](model, opt, f"{folder}/c")
                assert time.monotonic() - began < 6.0
                assert "rank 1" in str(raised.value)
                assert not os.path.exists(f"{folder}/c/manifest.json")
            dist.barrier()


@pytest.mark.parametrize("transport", ["host", "group"])
def test_e32_saving_on_rank_0_only(transport: str, tmp_path: Path) -> None:
    run(_on_rank_0, 2, transport, str(tmp_path))


# E51: killed while saving


def _die_at_the_first_file(folder: str) -> None:
    """Of this rank, as soon as one is there."""

    def watch() -> None:
        while not any(Path(folder).glob("parameters-*")):
            time.sleep(0.0005)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, daemon=True).start()


def _killed(rank: int, world: int, folder: str) -> None:
    model, opt = make(1)
    train(model, opt, rank, range(1))
    zero.save(f"{folder}/step-1", model, opt, extra=1)
    values = whole(model, opt)
    if rank == 0:
        torch.save(values, f"{folder}/values.pt")
    train(model, opt, rank, range(1, 2))
    _C.PART_BYTES = 256  # many small files, each flushed
    if rank == 1:
        _die_at_the_first_file(f"{folder}/step-2")
    zero.save(f"{folder}/step-2", model, opt, extra=2)


def _after_the_crash(rank: int, world: int, folder: str) -> None:
    assert zero.latest(folder) == f"{folder}/step-1"
    for stage in range(4):
        model, opt = make(stage, seed=1)
        assert zero.load(zero.latest(folder), model, opt) == 1
        assert_equal(whole(model, opt), torch.load(f"{folder}/values.pt"))
        with pytest.raises(ValueError, match="step-2"):
            zero.load(f"{folder}/step-2", model, opt)
    zero.save(f"{folder}/step-2", model, opt, extra=2)
    assert zero.latest(folder) == f"{folder}/step-2"
    file = sorted(Path(f"{folder}/step-2").glob("*.safetensors"))[0]
    dist.barrier()
    if rank == 0:
        file.write_bytes(file.read_bytes()[:-5])
    dist.barrier()
    with pytest.raises((ValueError, RuntimeError), match=file.name):
        zero.load(f"{folder}/step-2", model, opt)


def test_e51_killed_while_saving(tmp_path: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"rank 1 \(pid \d+\) died"):
        run(_killed, 2, str(tmp_path))
    assert not (tmp_path / "step-2" / "manifest.json").exists()
    run(_after_the_crash, 2, str(tmp_path))


# E52, E53 and E56: state and step counts, with torch's own classes too


@in_folder
def _frozen(rank: int, world: int, stage: int, folder: str) -> None:
    """E52: momentum of a parameter that is frozen where it is loaded."""
    for rule in ("sgd", torch.optim.SGD):

        def pair(rule: Any = rule) -> tuple[Free, zero.ZeroOptimizer]:
            model = Free(w=torch.zeros(()), v=torch.zeros(()))
            return model, zero.ZeroOptimizer(model, rule, stage=stage, lr=1.0, momentum=0.9)

        model, opt = pair()
        for _ in range(2):
            (model.w + model.v).backward()
            opt.step()
            opt.zero_grad()
        zero.save(folder, model, opt)
        fresh = Free(w=torch.zeros(()), v=torch.zeros(()))
        fresh.w.requires_grad_(False)
        fresh_opt = zero.ZeroOptimizer(fresh, rule, stage=stage, lr=1.0, momentum=0.9)
        zero.load(folder, fresh, fresh_opt)
        fresh.w.requires_grad_(True)
        (fresh.w + fresh.v).backward()
        fresh_opt.step()
        torch.testing.assert_close(zero.full_param(fresh.w), torch.tensor(-5.61))
        torch.testing.assert_close(zero.full_state(fresh.w)["momentum_buffer"], torch.tensor(2.71))


@in_folder
def _step_counts(rank: int, world: int, stage: int, folder: str) -> None:
    """E53: bias correction goes on, in each variant of torch's Adam."""
    variants: list[dict[str, Any]] = [
        {"optimizer": "adam"},
        {"optimizer": torch.optim.Adam, "foreach": False},
        {"optimizer": torch.optim.Adam, "foreach": True},
        {"optimizer": torch.optim.Adam, "fused": True},
    ]
    for variant in variants:
        model = Free(p=torch.ones(1))
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, **variant)
        for gradient in (1.0, -2.0, 3.0):
            (gradient * model.p).sum().backward()
            opt.step()
            opt.zero_grad()
        zero.save(folder, model, opt)
        fresh = Free(p=torch.zeros(1))
        fresh_opt = zero.ZeroOptimizer(fresh, stage=stage, lr=0.5, **variant)
        zero.load(folder, fresh, fresh_opt)
        (-1.0 * fresh.p).sum().backward()
        fresh_opt.step()
        torch.testing.assert_close(zero.full_param(fresh.p), torch.tensor([0.890139]))
        assert int(zero.full_state(fresh.p)["step"]) == 4


def test_e52_e53_state_and_counts_of_every_class() -> None:
    run(at_each_stage, 2, _frozen, _step_counts)


@in_folder
def _without_optimizer_files(rank: int, world: int, stage: int, folder: str) -> None:
    """E58: the model and the scheduler load, with one warning; with the optimizer, an error."""
    model, opt = make(stage)
    train(model, opt, rank, range(1))
    want = {name: zero.full_param(p) for name, p in model.named_parameters()}
    zero.save(folder, model, opt, extra={"scheduler": 3})
    dist.barrier()
    files = sorted(file.name for file in Path(folder).glob("optimizer-*"))
    dist.barrier()
    if rank == 0:
        for name in files:
            os.remove(f"{folder}/{name}")
    dist.barrier()
    fresh, fresh_opt = make(stage, seed=1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert zero.load(folder, fresh) == {"scheduler": 3}
    assert [("pass opt" in str(w.message)) for w in caught] == [True] * (rank == 0)
    assert all("test_checkpoint_cases" in w.filename for w in caught)
    assert_equal({name: zero.full_param(p) for name, p in fresh.named_parameters()}, want)
    assert fresh_opt.state_dict()["state"] == {}
    with pytest.raises((ValueError, RuntimeError), match="|".join(files)):
        zero.load(folder, fresh, fresh_opt)
    train(fresh, fresh_opt, rank, range(1, 2))


def test_e58_without_the_optimizer_files() -> None:
    run(at_each_stage, 2, _without_optimizer_files)


def _two_groups(stage: int, rule: Any) -> tuple[Free, zero.ZeroOptimizer]:
    """The second group is one element, which one rank holds."""
    model = Free(w=torch.ones(40), b=torch.ones(1))
    groups = [{"params": [model.w]}, {"params": [model.b], "weight_decay": 0.0}]
    settings: dict[str, Any] = {"stage": stage, "lr": 0.1, "timeout": 30.0}
    opt = zero.ZeroOptimizer(model, rule, param_groups=groups, weight_decay=0.01, **settings)
    return model, opt


def _five_steps(model: Free, opt: Any, steps: range) -> None:
    for step in steps:
        ((step + 1.0) * model.w.sum() + (step - 1.5) * model.b.sum()).backward()
        opt.step()
        opt.zero_grad()


RULES = ("adam", torch.optim.Adam)


def _save_groups(rank: int, world: int, folder: str) -> None:
    for stage in range(4):
        for at, rule in enumerate(RULES):
            model, opt = _two_groups(stage, rule)
            _five_steps(model, opt, range(5))
            zero.save(f"{folder}/{stage}-{at}", model, opt)


def _load_groups(rank: int, world: int, folder: str) -> None:
    plain = Free(w=torch.ones(40), b=torch.ones(1))
    groups = [{"params": [plain.w]}, {"params": [plain.b], "weight_decay": 0.0}]
    _five_steps(plain, torch.optim.Adam(groups, lr=0.1, weight_decay=0.01), range(6))
    for stage in range(4):
        for at, rule in enumerate(RULES):
            model, opt = _two_groups((stage + 1) % 4, rule)
            zero.load(f"{folder}/{stage}-{at}", model, opt)
            assert [int(zero.full_state(p)["step"]) for p in (model.w, model.b)] == [5, 5]
            _five_steps(model, opt, range(5, 6))
            got = {name: zero.full_param(p) for name, p in model.named_parameters()}
            assert_close(got, dict(plain.named_parameters()))


def test_e56_a_group_that_is_empty_on_one_rank(tmp_path: Path) -> None:
    run(_save_groups, 2, str(tmp_path))
    for world in (1, 3):
        run(_load_groups, world, str(tmp_path))
