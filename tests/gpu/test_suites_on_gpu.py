"""The parity, memory and hard-case suites of tests/distributed, with everything on a GPU."""

from __future__ import annotations

import pytest
from device_suites import ALONE, TOGETHER, run_bodies
from devices import Device, on
from ranks import run


@pytest.mark.parametrize("module", sorted(ALONE))
def test_one_rank_over_nccl(module: str) -> None:
    with on(Device("cuda", transport="nccl", world=1)):
        run(run_bodies, 1, module, ALONE[module], limit_s=300.0)


@pytest.mark.parametrize("module", sorted(TOGETHER))
def test_two_ranks_on_one_gpu(module: str) -> None:
    with on(Device("cuda", transport="host")):
        run(run_bodies, 2, module, TOGETHER[module], limit_s=300.0)
