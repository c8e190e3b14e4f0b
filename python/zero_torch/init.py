"""The process group that a launcher asks for."""

from __future__ import annotations

import datetime
import os

import torch
import torch.distributed as dist

from . import _C


def init(timeout: float = 600.0) -> None:
    """Makes torch.distributed's default process group from the launcher's environment.

    Understands torchrun, Open MPI, MPICH and Slurm. NCCL for CUDA tensors where this rank has a GPU
    of its own (which becomes the current device), Gloo for CPU tensors. Does nothing when a process
    group exists already, or without a launcher (one rank). ``timeout``: seconds.

    Collective: all ranks that the launcher started must call it. Raises ValueError for an
    environment variable that is missing or malformed.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    environment = _C.launch_environment()
    if environment is None:
        return
    for name, value in (
        ("RANK", environment.rank),
        ("WORLD_SIZE", environment.world_size),
        ("LOCAL_RANK", environment.local_rank),
        ("MASTER_ADDR", environment.master_addr),
        ("MASTER_PORT", environment.master_port),
    ):
        os.environ.setdefault(name, str(value))
    dist.init_process_group(
        _backend(environment.local_rank),
        rank=environment.rank,
        world_size=environment.world_size,
        timeout=datetime.timedelta(seconds=timeout),
    )


def default_group(timeout: float) -> dist.ProcessGroup | None:
    """The default process group, made by ``init()`` if a launcher asks for more than one rank."""
    if not dist.is_available():
        return None
    if not dist.is_initialized():
        environment = _C.launch_environment()
        if environment is None or environment.world_size == 1:
            return None
        init(timeout)
    return dist.group.WORLD


def _backend(local_rank: int) -> str:
    if not (torch.cuda.is_available() and dist.is_nccl_available()):
        return "gloo"
    if local_rank >= torch.cuda.device_count():
        return "gloo"
    torch.cuda.set_device(local_rank)
    return "cpu:gloo,cuda:nccl"
