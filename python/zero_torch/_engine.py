"""How a target gets its engine: the same way for ZeroOptimizer and ZeroModule."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from . import _C, _registry, gradients
from ._parameters import Collected
from ._watch import ModuleWatch
from .config import ZeroConfig, to_options
from .init import default_group


def make_engine(
    collected: Collected, config: ZeroConfig, stage: Any, process_group: Any
) -> _C.Engine:
    """The engine of collected parameters. Collective; everything local is checked before."""
    options = to_options(config, stage, collected.ignored)
    named = collected.named()
    _registry.refuse_managed((name, parameter) for name, parameter, _ in named)
    group = _checked_group(process_group)
    if group is None:
        group = default_group(config.timeout)
    engine = _C.Engine.create(named, collected.buffers, options, group)
    gradients.install(engine)
    _registry.add(engine)
    return engine


def watch(target: Any, engine: _C.Engine, collected: Collected) -> ModuleWatch | None:
    """Watches a module's parameters; None for a bare iterable of parameters."""
    if not isinstance(target, nn.Module):
        return None
    return ModuleWatch(target, engine, collected.ignored)


def _checked_group(process_group: Any) -> dist.ProcessGroup | None:
    if process_group is None:
        return None
    if not (dist.is_available() and isinstance(process_group, dist.ProcessGroup)):
        raise TypeError(
            "expected process_group to be a torch.distributed.ProcessGroup of which this rank is a "
            f"member, or None; got {process_group!r}"
        )
    return process_group
