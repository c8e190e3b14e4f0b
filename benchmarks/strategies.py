"""How a model is trained on all ranks: Zero and its peers, by name.

plain, plain_fused          one process; AdamW as torch defaults it, and fused
concurrent                  plain_fused in each rank's process at once, with no communication and
                            without page faults (see KEEP_FREED in common.py)
ddp, fsdp1, fsdp2           torch's, with AdamW as torch defaults it; NAME_fused with fused AdamW
zero_redundancy             DDP with torch's ZeroRedundancyOptimizer
zero0 ... zero3             Zero over the host's memory; NAME_group over Gloo
zero0_alone ... zero3_alone a group of one rank, in each rank's process at once: what Zero computes
                            where nothing is sent
zero3_auto                  stage 3 with the root and the last unit whole from forward to backward
                            (fsdp2 keeps its root)
deepspeed1 ... deepspeed3   DeepSpeed with torch's AdamW, from an environment that has it
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

SINGLE = ["plain", "plain_fused"]
PEERS = ["ddp", "ddp_fused", "zero_redundancy", "fsdp1", "fsdp2", "fsdp2_fused"]
ZERO = [f"zero{stage}" for stage in range(4)]
ZERO_GROUP = [f"{name}_group" for name in ZERO]
ZERO_ALONE = [f"{name}_alone" for name in ZERO]
AUTO = ["zero3_auto", "zero3_auto_group"]
DEEPSPEED = [f"deepspeed{stage}" for stage in (1, 2, 3)]
STRATEGIES = SINGLE + PEERS + ZERO + ZERO_GROUP + AUTO


def stage_of(strategy: str) -> int | None:
    """Of Zero's strategies on all ranks."""
    base = strategy.removesuffix("_group").removesuffix("_auto")
    return int(base[-1]) if base in ZERO else None


def transport_of(strategy: str) -> str:
    return "group" if strategy.endswith("_group") else "auto"


@dataclass
class Trainer:
    """A wrapped model: ``forward`` and a loss as before, then ``backward`` and ``step``."""

    model: nn.Module
    optimizer: Any
    engine: Any = None  # DeepSpeed's, which steps and goes backward itself

    def backward(self, loss: torch.Tensor) -> None:
        if self.engine is not None:
            self.engine.backward(loss)
        else:
            loss.backward()

    def step(self) -> None:
        if self.engine is not None:
            self.engine.step()
        else:
            self.optimizer.step()
            self.optimizer.zero_grad()

    def finish(self) -> None:
        """Zero's last all-gather overlaps the next forward: waits for it."""
        if hasattr(self.optimizer, "synchronize"):
            self.optimizer.synchronize()


def adamw(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if fused else None)


def _zero(strategy: str, model: nn.Module, options: dict[str, Any]) -> Trainer:
    import zero_torch as zero

    stage = stage_of(strategy)
    config = zero.ZeroConfig(
        transport=transport_of(strategy),
        reshard_after_forward="auto" if strategy in AUTO else True,
    )
    return Trainer(model, zero.ZeroOptimizer(model, stage=stage, lr=1e-3, config=config, **options))


def _ddp(strategy: str, model: nn.Module, _: type[nn.Module]) -> Trainer:
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    if strategy == "zero_redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
        return Trainer(wrapped, optimizer)
    return Trainer(wrapped, adamw(wrapped, strategy.endswith("_fused")))


def _fsdp1(strategy: str, model: nn.Module, block: type[nn.Module]) -> Trainer:
    from torch.distributed.fsdp import FullyShardedDataParallel
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    wrapped = FullyShardedDataParallel(
        model,
        auto_wrap_policy=ModuleWrapPolicy({block}),
        device_id=torch.device("cpu"),
        use_orig_params=True,
    )
    return Trainer(wrapped, adamw(wrapped, strategy.endswith("_fused")))


def _fsdp2(strategy: str, model: nn.Module, block: type[nn.Module]) -> Trainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in model.modules():
        if isinstance(module, block):
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return Trainer(model, adamw(model, strategy.endswith("_fused")))


def _deepspeed(strategy: str, model: nn.Module, _: type[nn.Module]) -> Trainer:
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    import logging

    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    config = {
        "train_micro_batch_size_per_gpu": 1,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
        "zero_optimization": {"stage": int(strategy[-1])},
        "gradient_clipping": 0.0,  # nobody else clips
    }
    engine, optimizer, _, _ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=config
    )
    return Trainer(engine, optimizer, engine)


_WAYS: dict[str, Callable[[str, nn.Module, type[nn.Module]], Trainer]] = {
    "ddp": _ddp,
    "zero_redundancy": _ddp,
    "fsdp1": _fsdp1,
    "fsdp2": _fsdp2,
    "deepspeed": _deepspeed,
}


def wrap(strategy: str, model: nn.Module, block: type[nn.Module], **zero_options: Any) -> Trainer:
    """``block``: the class of the modules that FSDP gathers together (Zero finds them itself,
    unless ``zero_options``, keywords of ZeroOptimizer, say otherwise)."""
    if stage_of(strategy) is not None:
        return _zero(strategy, model, zero_options)
    if strategy in ZERO_ALONE:
        alone, _ = dist.new_subgroups(group_size=1)
        base = strategy.removesuffix("_alone")
        return _zero(base, model, {"process_group": alone, **zero_options})
    if strategy in (*SINGLE, "concurrent"):
        return Trainer(model, adamw(model, strategy != "plain"))
    base = strategy.removesuffix("_fused")
    return _WAYS["deepspeed" if base in DEEPSPEED else base](strategy, model, block)
