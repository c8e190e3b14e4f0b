"""Runs a function on several ranks, each a process, and judges what they return.

Plain multiprocessing over Gloo on loopback, one thread a rank, a time limit on
all: `run(function, world, *arguments)` gives the ranks' return values in order,
or fails with the first rank's traceback. Ranks are forked from a server that has
imported torch, and does nothing else; with `fresh=True` they are new programs.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import multiprocessing
import os
import queue
import random
import socket
import time
import traceback
from collections.abc import Callable
from typing import Any

import devices
import pytest

LIMIT_S = 90.0


def _free_port() -> int:
    """Below those that the system gives out, and another pytest at work draws from its own."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    first = 16_000 + worker % 8 * 2_000
    while True:
        port = random.randrange(first, first + 2_000)
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


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


def start(
    function: Callable[..., Any], world: int, *arguments: Any, fresh: bool = False
) -> tuple[list[Any], Any]:
    """The processes of ranks that run ``function``, and the queue of their results."""
    context = multiprocessing.get_context("spawn" if fresh else "forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "zero_torch"])
    results = context.Queue()
    port = _free_port()
    processes = [
        context.Process(
            target=_work,
            args=(
                function,
                rank,
                world,
                port,
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
    return processes, results


def run(
    function: Callable[..., Any],
    world: int,
    *arguments: Any,
    limit_s: float = LIMIT_S,
    fresh: bool = False,
) -> list[Any]:
    device = devices.current()
    world = device.world if device is not None and device.world is not None else world
    processes, results = start(function, world, *arguments, fresh=fresh)
    outcome: dict[int, tuple[str, Any]] = {}
    deadline = time.monotonic() + limit_s
    try:
        while len(outcome) < world and time.monotonic() < deadline:
            alive = any(process.is_alive() for process in processes)
            with contextlib.suppress(queue.Empty):
                rank, kind, value = results.get(timeout=0.5)
                outcome[rank] = (kind, value)
                continue
            if not alive:
                break
    finally:
        for process in processes:
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
