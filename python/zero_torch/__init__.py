"""Data-parallel training with sharded optimizer state and gradients.

    import zero_torch as zero

    zero.init()
    optimizer = zero.ZeroOptimizer(model, stage=2, lr=3e-4)

The model is called as before; ``optimizer`` is a ``torch.optim.Optimizer``.
"""

from __future__ import annotations

from . import _abi

_abi.check()

from .checkpoint import async_save, latest, load, save  # noqa: E402
from .comm_hooks import GradientBucket  # noqa: E402
from .config import ZeroConfig  # noqa: E402
from .consolidate import consolidate  # noqa: E402
from .deferred import deferred_init  # noqa: E402
from .ema import EMA  # noqa: E402
from .init import init  # noqa: E402
from .inspect import full_grad, full_param, full_state, gathered, unwrap  # noqa: E402
from .join import join  # noqa: E402
from .module import ZeroModule  # noqa: E402
from .optimizer import ZeroOptimizer  # noqa: E402
from .report import report  # noqa: E402
from .state import load_state_dict, optimizer_state_dict, state_dict  # noqa: E402

__all__ = [
    "EMA",
    "GradientBucket",
    "ZeroConfig",
    "ZeroModule",
    "ZeroOptimizer",
    "async_save",
    "consolidate",
    "deferred_init",
    "full_grad",
    "full_param",
    "full_state",
    "gathered",
    "init",
    "join",
    "latest",
    "load",
    "load_state_dict",
    "optimizer_state_dict",
    "report",
    "save",
    "state_dict",
    "unwrap",
]
