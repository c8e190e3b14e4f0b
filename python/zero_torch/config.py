"""What a user may set, and how it reaches C++.

The rules about values live in C++ (``zero::Options::validate``); here only types are checked, and
what has a Python form of its own (dtypes, process groups, parameters) is turned into the C++ form.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from . import _C
from ._groups import group_name

Units = Iterable[type[nn.Module] | str] | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class ZeroConfig:
    """Settings of ``ZeroOptimizer`` and ``ZeroModule``: the fields and defaults of C++ ``Options``.

    Every field is a keyword argument of both classes too. Values are checked when one of them is
    constructed, before anything communicates; what is not built yet is refused by name there.
    """

    bucket_bytes: int = 25 * 1024 * 1024
    """Gradients are reduced in buckets of about this many bytes ..."""
    first_bucket_bytes: int = 1024 * 1024
    """... but the first, which backward fills first, is small to start early."""
    prefetch: int = 1
    """Stage 3: units gathered ahead of their use. No effect at stages 0-2."""
    reshard_after_forward: bool | str = True
    """Stage 3: True, False or "auto". No effect at stages 0-2."""
    units: Units | None = None
    """Stage 3: classes, names or a predicate ``(name, module) -> bool`` of the submodules that are
    gathered together. No effect at stages 0-2."""
    min_unit_numel: int = 8192
    """Stage 3: units smaller than this many elements are merged with a neighbour; a gather of a few
    bytes costs as much as one of many. No effect at stages 0-2."""
    max_live_numel: int | None = None
    """Stage 3: most elements gathered at once. No effect at stages 0-2."""
    param_dtype: torch.dtype | None = None
    """Mixed precision: what floating-point parameters become when they are wrapped, bfloat16,
    float16 or float32. Those of 16 bits have fp32 masters of this rank's shard, which are stepped.
    Parameters of batch norms keep their dtype, and so do buffers."""
    reduce_dtype: torch.dtype | None = None
    """What each reduction of gradients is rounded to; by default the parameters' dtype, and float32
    with ``param_dtype=float16``, whose range a loss scale needs. Gradients of fp32 are sent in 16
    bits too, then. Sums over several backwards are of fp32 in any case."""
    master_dtype: torch.dtype | None = None
    """float32: parameters that have 16 bits already get masters too, without ``param_dtype``."""
    output_dtype: torch.dtype | None = None
    """What floating-point tensors in the module's output are cast to. Needs a module as target."""
    cast_forward_inputs: bool = False
    """Floating-point tensors in the module's inputs are cast to ``param_dtype``. Needs a module as
    target."""
    average: bool = True
    """True: the mean of the ranks' gradients; False: their sum."""
    transport: str = "auto"
    """"host": ranks of one host read each other's memory; "group": point to point over Gloo;
    "auto": the first where all ranks are on one host, else the second. Of parameters on a GPU:
    "nccl", which "auto" takes for them with several ranks, needs a GPU for each rank; "host" and
    "group" send them through the host, also from ranks that share a GPU."""
    timeout: float = 600.0
    """Seconds that a rank waits for its peers before it raises an error."""
    on_nonfinite: str = "ignore"
    """What a step does that sees an inf or NaN in a gradient, of any dtype, on any rank: "skip"
    leaves the step out and "raise" raises RuntimeError, on all ranks and with nothing changed;
    "ignore" does not look, as torch. The first two cost a step one pass over the gradients and a
    message of 8 bytes."""
    sync_buffers: bool = False
    """Rank 0's values of the module's buffers go to all ranks before each training forward (with
    grad mode, outside ``no_sync``) and in each step, so that they are the same after it; without
    it once, at construction. Needs a module as target."""
    ignored_params: Iterable[str | torch.Tensor] = ()
    """Names of parameters, or the parameters, that are neither reduced nor stepped."""
    step_in_backward: bool = False
    """Each bucket of parameters is stepped, and its gradient freed, as soon as it is reduced in
    backward; ``step()`` ends the step. Hyper-parameters are read when backward begins. Native rules
    and one backward a step only; clipping, norms, ``no_sync``, GradScaler and ``on_nonfinite`` need
    all gradients and are refused."""
    offload: str | None = None
    """Of parameters on a device: "optimizer" keeps masters and state in the host's memory, where
    the CPU steps them; "parameters", at stage 3, the shards of parameters too. None: all of it is
    where the parameters are."""
    registered_buffers: bool = False
    """Not built yet."""
    shard_group: Any = None
    """Hybrid sharding: the process group (or 1-D DeviceMesh) that this rank shards in, usually the
    ranks of its host. Needs ``replicate_group``."""
    replicate_group: Any = None
    """Hybrid sharding: the process group (or 1-D DeviceMesh) of the ranks that hold the same shard
    as this one, usually one of each host. Needs ``shard_group``; all ranks' groups together are the
    rows and the columns of a grid."""


FIELDS = tuple(field.name for field in dataclasses.fields(ZeroConfig))

_INTEGERS = ("bucket_bytes", "first_bucket_bytes", "prefetch", "min_unit_numel")
_BOOLEANS = (
    "cast_forward_inputs",
    "average",
    "sync_buffers",
    "step_in_backward",
    "registered_buffers",
)
_STRINGS = ("transport", "on_nonfinite")
_DTYPES = ("param_dtype", "reduce_dtype", "master_dtype", "output_dtype")
_GROUPS = ("shard_group", "replicate_group")


def merged(config: ZeroConfig | None, overrides: dict[str, Any]) -> ZeroConfig:
    """``config`` (or the defaults) with keyword arguments of the same names put over it."""
    if config is not None and not isinstance(config, ZeroConfig):
        raise TypeError(f"expected config to be a ZeroConfig, got {type(config).__name__}")
    result = dataclasses.replace(config or ZeroConfig(), **overrides)
    if isinstance(result.units, Iterator):
        result = dataclasses.replace(result, units=tuple(result.units))
    return result


def to_options(config: ZeroConfig, stage: Any, ignored: Sequence[str] = ()) -> _C.Options:
    """The validated C++ options. ``ignored`` are the resolved names of ``config.ignored_params``.

    Raises TypeError for a value of the wrong type and ValueError for one out of range, naming the
    argument and what is allowed.
    """
    options = _C.Options()
    options.stage = _integer("stage", stage, "0, 1, 2 or 3")
    for name in _INTEGERS:
        setattr(options, name, _integer(name, getattr(config, name), "an int"))
    if config.max_live_numel is not None:
        options.max_live_numel = _integer("max_live_numel", config.max_live_numel, "an int or None")
    for name in _BOOLEANS:
        setattr(options, name, _typed(name, getattr(config, name), bool, "True or False"))
    for name in _STRINGS:
        setattr(options, name, _typed(name, getattr(config, name), str, "a str"))
    for name in _DTYPES:
        dtype = getattr(config, name)
        if dtype is not None:
            _typed(name, dtype, torch.dtype, "a torch.dtype or None")
            setattr(options, name, str(dtype).removeprefix("torch."))
    given = {name: getattr(config, name) for name in _GROUPS}
    names = {name: group_name(name, value) for name, value in given.items() if value is not None}
    if len(names) == len(_GROUPS):  # else all ranks are told
        for name, value in names.items():
            setattr(options, name, value)
    if config.offload is not None:
        options.offload = _typed("offload", config.offload, str, "a str or None")
    options.reshard_after_forward = _reshard(config.reshard_after_forward)
    options.timeout = _number("timeout", config.timeout)
    options.units = _unit_names(config.units)
    options.ignored_params = list(ignored)
    options.validate()
    return options


def _typed(name: str, value: Any, kind: type, allowed: str) -> Any:
    if not isinstance(value, kind):
        raise TypeError(f"expected {name} to be {allowed}, got {value!r}")
    return value


def _integer(name: str, value: Any, allowed: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"expected {name} to be {allowed}, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"expected {name} to fit in 64 bits, got {value!r}")
    return value


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected {name} to be a number of seconds, got {value!r}")
    return float(value)


def _reshard(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if value != "auto":
        raise ValueError(
            f'expected reshard_after_forward to be True, False or "auto", got {value!r}'
        )
    return "auto"


def _unit_names(units: Any) -> list[str]:
    """The units that are given by name; classes and predicates are resolved at stage 3 only."""
    if units is None or (callable(units) and not isinstance(units, type)):
        return []
    if isinstance(units, str | type) or not isinstance(units, Iterable):
        raise TypeError(
            "expected units to be None, a list of module classes or names, or a predicate "
            f"(name, module) -> bool; got {units!r}"
        )
    names = []
    for unit in units:
        if isinstance(unit, str):
            names.append(unit)
        elif not (isinstance(unit, type) and issubclass(unit, nn.Module)):
            raise TypeError(f"expected each of units to be a module class or a name, got {unit!r}")
    return names
