"""Runs a function on several ranks, each a process, and judges what they return.

Plain multiprocessing over Gloo on loopback, one thread a rank, a time limit on
all: `run(function, world, *arguments)` gives the ranks' return values in order,
or fails with the first rank's traceback. Ranks are forked from a server that has
imported torch, and does nothing else; with `fresh=True` they are new programs. The
store where they meet is the test's, as a launcher's: no rank waits for another to
serve it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import queue
import time
import traceback
from collections.abc import Callable
from typing import Any, NamedTuple

import devices
import pytest
from torch.distributed import TCPStore

LIMIT_S = 90.0


class Launch(NamedTuple):
    """Ranks at work, where they put what they return, and where they meet."""

    processes: list[Any]
    results: Any
    store: TCPStore


def _work(
    function: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    results: Any,
    environment: dict[str, str],
    device: devices.Device | None,
    arguments: tuple,
) -> None:
    os.environ.clear()  # the server's, which is that of the first test
    os.environ.update(
        environment,
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(world),
        OMP_NUM_THREADS="1",
    )
    import torch

    torch.set_num_threads(1)
    import zero_torch as zero

    gc.freeze()  # tests collect often, and never what was imported
    try:
        zero.init()
        if device is None:
            value = function(rank, world, *arguments)
        else:
            value = devices.call(device, function, rank, world, *arguments)
        results.put((rank, "value", value))
    except BaseException:
        results.put((rank, "error", traceback.format_exc()))
    results.close()
    results.join_thread()
    os._exit(0)  # a peer that failed must not hold this rank at exit


def start(function: Callable[..., Any], world: int, *arguments: Any, fresh: bool = False) -> Launch:
    """Ranks that run ``function``, for as long as what this returns is kept."""
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "zero_torch"])
    results = context.Queue()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        context.Process(
            target=_work,
            args=(
                function,
                rank,
                world,
                store.port,
                results,
                dict(os.environ),
                devices.current(),
                arguments,
            ),
            daemon=True,
        )
        for rank in range(world)
    ]
    for process in processes:
        process.start()
    return Launch(processes, results, store)


def run(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> list[Any]:
    device = devices.current()
    world = device.world if device is not None and device.world is not None else world
    launch = start(function, world, *arguments, fresh=fresh)
    outcome: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(outcome) < world and time.monotonic() < deadline:
            alive = any(process.is_alive() for process in launch.processes)
            with contextlib.suppress(queue.Empty):
                rank, kind, value = launch.results.get(timeout=0.5)
                outcome[rank] = (kind, value)
                continue
            if not alive:
                break
    finally:
        for process in launch.processes:
            process.kill()
            process.join()
    errors = [f"rank {r}: {value}" for r, (kind, value) in outcome.items() if kind == "error"]
    if errors:
        pytest.fail("\n".join(errors), pytrace=False)
    missing = sorted(set(range(world)) - set(outcome))
    if missing:
        pytest.fail(f"ranks {missing} gave nothing within {limit_s} s", pytrace=False)
    return [outcome[rank][1] for rank in range(world)]


def at_each_stage(rank: int, world: int, *cases: Callable[[int, int, int], None]) -> None:
    """For ``run``: each ``case(rank, world, stage)`` at stages 0 to 3, in one set of processes."""
    for case, stage in itertools.product(cases, range(4)):
        _at_stage(case, rank, world, stage)


def _at_stage(case: Callable[[int, int, int], None], rank: int, world: int, stage: int) -> None:
    try:
        case(rank, world, stage)
    except Exception as error:
        raise AssertionError(f"{case.__name__} at stage {stage}: {error}") from error
