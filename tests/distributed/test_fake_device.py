"""The Python face on a device with streams: the fake one of tests/cpp/fake_device.

Its checker raises for accesses and frees that streams and events leave unordered, and for calls
that make the host wait where a step must not.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import devices
import pytest
import torch
import torch.distributed as dist
from device_suites import ALONE, TOGETHER, run_bodies
from devices import Device, on
from models import assert_equal, batch, loss_of, make_gpt, mlp
from ranks import run
from torch import nn

import zero_torch as zero

SMALL = {"bucket_bytes": 8192, "first_bucket_bytes": 2048, "min_unit_numel": 0}
RANKS, STEPS, WARM = 2, 6, 2


@pytest.mark.parametrize("module", sorted(TOGETHER))
def test_two_ranks_through_the_host(module: str) -> None:
    with on(Device("fake", transport="host")):
        run(run_bodies, 2, module, TOGETHER[module])


@pytest.mark.parametrize("module", sorted(ALONE))
def test_one_rank(module: str) -> None:
    with on(Device("fake", transport="auto", world=1)):
        run(run_bodies, 1, module, ALONE[module])


# ---- ranks that are threads, each with a device, whose collectives run on streams


def _in_threads(body: Callable[[int], Any]) -> list[Any]:
    results: dict[int, Any] = {}
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = body(rank)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(RANKS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(RANKS)]


def _with_plain_attention() -> None:
    """The CPU's own kernels of attention round otherwise than what a device of this kind runs."""
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)


def _gpt_on(device: str, seed: int = 0) -> nn.Module:
    """Built there: ``to`` unties parameters on the way to a device of this kind."""
    with torch.device(device):
        model = make_gpt()
    model.load_state_dict(make_gpt(seed).state_dict())
    return model


@contextlib.contextmanager
def _without_waiting(fake: Any, rank: int, asked: bool) -> Iterator[None]:
    never = fake.NoSynchronization(rank) if asked else None
    try:
        yield
    finally:
        del never


def _train(fake: Any, kind: str, stage: int, scaled: bool, **settings: Any) -> list[Any]:
    """By rank: (weights, norms), on the CPU, of a small GPT trained on devices of ``kind``."""
    store = dist.HashStore()

    def rank_of(rank: int) -> Any:
        fake.set_device(rank)
        device = "cpu" if kind == "cpu" else f"{kind}:{rank}"
        group = fake.make_group(store, rank, RANKS)
        with lock:
            model = _gpt_on(device, seed=rank)
        opt = zero.ZeroOptimizer(
            model, stage=stage, lr=1e-2, process_group=group, **SMALL, **settings
        )
        scaler = torch.amp.GradScaler(kind, enabled=scaled, init_scale=2.0**10)
        batches = [batch(step, rank).to(device) for step in range(STEPS)]
        norms = []
        for step, tokens in enumerate(batches):
            with _without_waiting(fake, rank, kind != "cpu" and step >= WARM):
                scaler.scale(loss_of(model, tokens)).backward()
                scaler.unscale_(opt)
                norms.append(opt.clip_grad_norm_(0.5))
                scaler.step(opt)
                scaler.update()
                opt.zero_grad()
        opt.synchronize()
        weights = {name: zero.full_param(p).cpu() for name, p in model.named_parameters()}
        return weights, [float(norm) for norm in norms]

    lock = threading.Lock()  # the generator of initial values is the process's
    return _in_threads(rank_of)


def _as_on_the_cpu(rank: int, world: int, scaled: bool, settings: dict[str, Any]) -> None:
    fake = devices.load_fake()
    _with_plain_attention()
    torch.use_deterministic_algorithms(True)
    for stage in range(4):
        wanted = _train(fake, "cpu", stage, scaled, transport="host", **settings)
        got = _train(fake, "fake", stage, scaled, **settings)
        fake.check()
        for (weights, norms), (others, other_norms) in zip(wanted, got, strict=True):
            assert_equal(weights, others)
            assert norms == other_norms
        assert_equal(got[0][0], got[1][0])


@pytest.mark.parametrize(
    ("scaled", "settings"),
    [(False, {}), (True, {}), (False, {"on_nonfinite": "skip"})],
    ids=["clipping", "scaler", "skip"],
)
def test_steps_on_streams_have_the_bits_of_the_cpu_and_never_wait(
    scaled: bool, settings: dict[str, Any]
) -> None:
    run(_as_on_the_cpu, 1, scaled, settings)


def _apart(rank: int, world: int) -> None:
    fake = devices.load_fake()
    for stage in range(4):
        fake.reset()
        _train(fake, "fake", stage, False)
        fake.check()
        for device in range(RANKS):
            found = fake.operations(device)
            compute = {stream for name, stream in found if name == "addmm"}
            kinds = {"_reduce_scatter_base", "_allgather_base", "allreduce"}
            collectives = {(name, stream) for name, stream in found if name in kinds}
            assert len(compute) == 1, stage
            assert collectives, stage
            assert compute.isdisjoint({stream for _, stream in collectives}), stage
            if stage == 3:  # gathers and reductions have a stream each
                gathers = {stream for name, stream in collectives if name == "_allgather_base"}
                others = {stream for name, stream in collectives if name != "_allgather_base"}
                assert gathers - others  # the norm's gather goes with the reductions


def test_collectives_run_on_streams_of_their_own() -> None:
    run(_apart, 1)


# ---- what only a device shows


def _optimizer_classes(rank: int, world: int, stage: int) -> None:
    for settings in ({"capturable": True}, {"foreach": True}, {"foreach": False}):
        weights = []
        for device in ("cpu", "fake:0"):
            model = mlp().to(device)
            given = settings if device != "cpu" else {}
            opt = zero.ZeroOptimizer(
                model, torch.optim.AdamW, stage=stage, lr=1e-2, transport="host", **SMALL, **given
            )
            for step in range(3):
                x = torch.full((4, 5), 0.1 * (step + rank + 1)).to(device)
                model(x).square().mean().backward()
                opt.step()
                opt.zero_grad()
                state = zero.optimizer_state_dict(opt, rank0_only=False)
                zero.load_state_dict(opt, state, rank0_only=False)
            steps = {state["step"].device.type for state in state["state"].values()}
            assert len(steps) == 1, steps
            weights.append([zero.full_param(p).cpu() for p in model.parameters()])
        for one, other in zip(*weights, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def _deferred(rank: int, world: int, stage: int) -> None:
    with torch.device("fake:0"), zero.deferred_init():
        model = make_gpt()
    assert all(p.is_meta for p in model.parameters())
    torch.manual_seed(3)
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, transport="host", **SMALL)
    for p in model.parameters():
        assert zero.full_param(p).device == torch.device("fake:0")
    loss_of(model, batch(0, rank).to("fake:0")).backward()
    opt.step()


def _cases(rank: int, world: int) -> None:
    fake = devices.load_fake()
    _with_plain_attention()
    for stage in range(4):
        for case in (_optimizer_classes, _deferred):
            case(rank, world, stage)
    fake.check()


def test_optimizer_classes_and_deferred_models_on_a_device() -> None:
    run(_cases, 2)
