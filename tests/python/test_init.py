"""init(): what it does to the environment and to torch.distributed."""

import os
import socket
import subprocess
import sys

import pytest
import torch.distributed as dist

import zero_torch as zero

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def run(code, **environment):
    clean = {k: v for k, v in os.environ.items() if k not in VARIABLES}
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_does_nothing_without_a_launcher():
    zero.init()
    assert not dist.is_initialized()


@pytest.mark.slow
def test_an_incomplete_environment_is_an_error_with_the_variable_s_name():
    result = run("import zero_torch as zero; zero.init()", WORLD_SIZE="2")
    assert result.returncode != 0
    assert "ValueError" in result.stderr
    assert "RANK" in result.stderr


@pytest.mark.slow
def test_makes_the_group_and_fills_in_torch_s_variables():
    code = """
import os, torch.distributed as dist, zero_torch as zero
zero.init(timeout=20); zero.init()
assert dist.get_world_size() == 1 and dist.get_backend() == "gloo", dist.get_backend()
assert os.environ["RANK"] == os.environ["LOCAL_RANK"] == "0" and os.environ["WORLD_SIZE"] == "1"
import torch
model = torch.nn.Linear(2, 2)
opt = zero.ZeroOptimizer(model, stage=1)
model(torch.ones(2)).sum().backward(); opt.step()
dist.destroy_process_group()
"""
    result = run(
        code,
        OMPI_COMM_WORLD_RANK="0",
        OMPI_COMM_WORLD_SIZE="1",
        OMPI_COMM_WORLD_LOCAL_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(free_port()),
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_an_optimizer_made_first_makes_the_group():
    code = """
import os, socket, subprocess, sys, torch, torch.distributed as dist, zero_torch as zero
if "RANK" not in os.environ:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0)); port = s.getsockname()[1]
    os.environ.update(WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    ranks = [subprocess.Popen([sys.executable, "-c", os.environ["CODE"]], env={**os.environ,
             "RANK": str(r), "LOCAL_RANK": str(r)}) for r in range(2)]
    sys.exit(any([r.wait() for r in ranks]))
opt = zero.ZeroOptimizer(torch.nn.Linear(2, 2), stage=1)
assert dist.get_world_size() == opt._engine.world_size == 2
"""
    result = run(code, CODE=code, OMP_NUM_THREADS="1")
    assert result.returncode == 0, result.stderr
