"""What users of FSDP, DDP, ZeroRedundancyOptimizer and DeepSpeed reach for, and what does it here.

Names that exist here under the same name are not in these lists.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Any

from torch import nn

from . import _C

_OF_MODULES = {
    # FSDP2
    "set_is_last_backward": "each backward reduces at its end; no_sync() is for others",
    "set_requires_all_reduce": "use no_sync(), or set_requires_gradient_sync()",
    "set_reshard_after_forward": "give reshard_after_forward where the model is sharded",
    "set_reshard_after_backward": "parameters are freed as backward leaves them; unshard() keeps "
    "them whole until reshard()",
    "set_modules_to_forward_prefetch": "the order of units is learned; prefetch= says how many",
    "set_modules_to_backward_prefetch": "the order of units is learned; prefetch= says how many",
    "set_post_optim_event": "step() orders its own transfers",
    "set_unshard_in_backward": "parameters are gathered in backward only where it reads them",
    "set_gradient_divide_factor": "use average=False and optimizer.divide_grad_(divisor)",
    "set_reduce_scatter_divide_factor": "use average=False and optimizer.divide_grad_(divisor)",
    "set_allocate_memory_from_process_group_for_comm": "buffers come from the transport already",
    # FSDP
    "summon_full_params": "use zero_torch.gathered(model, writeback=...)",
    "clip_grad_norm_": "use optimizer.clip_grad_norm_()",
    "full_optim_state_dict": "use zero_torch.optimizer_state_dict(optimizer)",
    "optim_state_dict": "use zero_torch.optimizer_state_dict(optimizer)",
    "sharded_optim_state_dict": "use zero_torch.optimizer_state_dict(optimizer)",
    "optim_state_dict_to_load": "use zero_torch.load_state_dict(optimizer, state_dict)",
    "state_dict_type": "state_dict() gives whole values; see zero_torch.state_dict(model)",
    "set_state_dict_type": "state_dict() gives whole values; see zero_torch.state_dict(model)",
    # DDP
    "reducer": "buckets are the library's own; see zero_torch.report(optimizer)",
    # DeepSpeed
    "backward": "call loss.backward()",
    "step": "call optimizer.step()",
    "save_checkpoint": "use zero_torch.save(directory, model, optimizer)",
    "load_checkpoint": "use zero_torch.load(directory, model, optimizer)",
    "is_gradient_accumulation_boundary": "call step() when the step is due; backwards add up",
    "get_global_grad_norm": "use optimizer.grad_norm(), or what clip_grad_norm_() returns",
}

_OF_OPTIMIZERS = {
    # ZeroRedundancyOptimizer
    "consolidate_state_dict": "state_dict() gives whole states on every rank; "
    "zero_torch.optimizer_state_dict(optimizer) on rank 0 only",
    "join_hook": "use zero_torch.join(optimizer)",
    # FSDP, DeepSpeed
    "backward": "call loss.backward()",
    "clip_master_grads": "use clip_grad_norm_(); gradients are scaled where they are",
    "loss_scale": "use torch.amp.GradScaler",
    "cur_scale": "use torch.amp.GradScaler",
    "unshard": "call unshard() of the ZeroModule",
    "reshard": "call reshard() of the ZeroModule",
    "unscale_": "use torch.amp.GradScaler's unscale_(optimizer)",
    "overflow": "set on_nonfinite, and see zero_torch.report(optimizer).nonfinite_steps",
}


def missing_in_module(module: nn.Module, name: str, error: AttributeError) -> AttributeError:
    """The error for a name that the inner module lacks: its own, with what to use here."""
    return _with_hint(error, "ZeroModule", name, _OF_MODULES) if name in _OF_MODULES else error


def missing_in_optimizer(name: str) -> AttributeError:
    """The error for a name that a ZeroOptimizer lacks."""
    error = AttributeError(f"'ZeroOptimizer' object has no attribute '{name}'", name=name)
    return _with_hint(error, "ZeroOptimizer", name, _OF_OPTIMIZERS)


def _with_hint(
    error: AttributeError, owner: str, name: str, hints: dict[str, str]
) -> AttributeError:
    if name not in hints:
        return error
    return AttributeError(f"{error}; {owner} has no {name}: {hints[name]}", name=name)


class _RefusesDdp:
    """Names of parameters that DDP shall leave alone: reading them says that it has no place here.

    Wrapped in DDP, gradients would be averaged twice.
    """

    def __iter__(self) -> Iterator[str]:
        raise RuntimeError(
            "expected a module whose gradients nobody reduces, got one that is managed by a "
            "ZeroOptimizer or ZeroModule, which does what DistributedDataParallel would: leave "
            "DDP out (stage=0 is its equal), or take the model back first with zero_torch.unwrap"
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return set, ()  # a copy of the model is a plain one


class DdpRefusal:
    """As long as it is on a module, DDP of the module raises RuntimeError; ``remove()`` ends it."""

    _NAME = "_ddp_params_and_buffers_to_ignore"  # what DDP looks at first

    def __init__(self, module: nn.Module, engine: _C.Engine) -> None:
        self.remove = weakref.finalize(engine, self._take_off, weakref.ref(module))
        self.remove.atexit = False
        if not hasattr(module, self._NAME):
            setattr(module, self._NAME, _RefusesDdp())

    @classmethod
    def _take_off(cls, reference: weakref.ref[nn.Module]) -> None:
        module = reference()
        if module is not None and isinstance(getattr(module, cls._NAME, None), _RefusesDdp):
            delattr(module, cls._NAME)
