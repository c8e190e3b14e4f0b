"""The process group that a launcher asks for."""

from __future__ import annotations

import datetime
import os
import warnings
from typing import Any

import torch
import torch.distributed as dist

from . import _C


def init(timeout: float = 600.0) -> None:
    """Makes torch.distributed's default process group from the launcher's environment.

    Understands torchrun, Open MPI, MPICH and Slurm. CPU tensors go over Gloo. A process that sees
    GPUs works on device LOCAL_RANK modulo their number, which becomes the current device; CUDA
    tensors go over NCCL where every rank has a GPU of its own, else over Gloo, with a warning that
    names the ranks. Does nothing when a process group exists already, or without a launcher (one
    rank). ``timeout``: seconds.

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
    rank, world_size = environment.rank, environment.world_size
    limit = datetime.timedelta(seconds=timeout)
    backend, store = "gloo", None
    if torch.version.cuda is not None and dist.is_nccl_available():
        from torch.distributed.rendezvous import rendezvous

        store, rank, world_size = next(rendezvous("env://", rank, world_size, timeout=limit))
        if _can_use_nccl(store, environment, timeout):
            backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=limit)


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


def _can_use_nccl(store: Any, environment: _C.LaunchEnvironment, timeout: float) -> bool:
    """Which every rank decides alike: groups of different kinds would wait for each other."""
    gpu = ""
    if torch.cuda.is_available():
        device = environment.local_rank % torch.cuda.device_count()
        torch.cuda.set_device(device)
        gpu = str(torch.cuda.get_device_properties(device).uuid)
    rank, world_size = environment.rank, environment.world_size
    obstacle = _C.nccl_obstacle(store, rank, world_size, gpu, timeout)
    if obstacle and gpu and environment.local_rank == 0:
        warnings.warn(
            f"[zero] CUDA tensors go over Gloo, not NCCL: {obstacle}; {_C.GPU_REMEDY}",
            stacklevel=3,
        )
    return not obstacle
