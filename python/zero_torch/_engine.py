"""How a target gets its engine: the same way for ZeroOptimizer and ZeroModule."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from . import _C, _buffers, _casts, _hooks, _names, _registry, gradients
from ._groups import ranks_of
from ._habits import DdpRefusal
from ._parameters import Collected, parameters_of_batch_norms
from ._units import Found, find_units
from ._watch import ModuleWatch
from .config import ZeroConfig, to_options
from .deferred import Materializer


def prepare(target: Any, stage: Any, init_fn: Any, init_from: Any) -> Materializer | None:
    """What a module without storage is materialized by: here at stages 0-2, later at stage 3.

    None when there is nothing left to do. Not collective; raises for what can't be initialized.
    """
    if not isinstance(target, nn.Module):
        if init_fn is not None or init_from is not None:
            raise TypeError("init_fn and init_from need a module as target")
        return None
    materializer = Materializer(target, init_fn=init_fn, init_from=init_from)
    if not materializer.needed:
        if init_fn is not None or init_from is not None:
            raise ValueError(
                "init_fn and init_from are for a model without storage, and this one has values; "
                "build it under zero_torch.deferred_init()"
            )
        return None
    materializer.check()
    if stage == 3:
        return materializer
    materializer.materialize([name for name, _ in _names.named_parameters(target)])
    materializer.finish()
    return None


def make_engine(
    target: Any,
    collected: Collected,
    config: ZeroConfig,
    stage: Any,
    process_group: Any,
    materializer: Materializer | None = None,
) -> _C.Engine:
    """The engine of collected parameters. Collective; everything local is checked before.

    Parameters without storage are materialized unit by unit; ``collected`` has them then.
    """
    options = to_options(config, stage, collected.ignored)
    named = collected.named()
    module = target if isinstance(target, nn.Module) else None
    if options.stage == 3 and module is None:
        raise TypeError(
            "expected an nn.Module at stage 3, whose forward says when parameters are needed; "
            f"got {type(target).__name__}: pass the module, or use stage 0, 1 or 2"
        )
    if module is None and (config.cast_forward_inputs or config.output_dtype is not None):
        raise TypeError(
            "expected an nn.Module with cast_forward_inputs or output_dtype, which are about its "
            f"forward; got {type(target).__name__}"
        )
    if module is None and config.sync_buffers:
        raise TypeError(
            f"expected an nn.Module with sync_buffers, got {type(target).__name__}, which has none"
        )
    found = find_units(module, named, config) if options.stage == 3 else Found([""], [], [])
    of_parameter = found.of_parameter or [0] * len(named)
    group = ranks_of(process_group, config)
    fixed = parameters_of_batch_norms(module)
    parameters = [
        (*item, unit, id(item[1]) in fixed) for item, unit in zip(named, of_parameter, strict=True)
    ]
    if materializer is None:
        engine = _C.Engine.create(parameters, collected.buffers, options, group, found.names)
    else:
        engine = _create_deferred(materializer, parameters, options, group, found)
        collected.replace([engine.parameter(index)[1] for index in range(len(named))])
    gradients.install(engine)
    if module is not None:
        handles = _casts.attach(module, config) + _buffers.attach(engine, module)
        _hooks.attach(engine, module, found, [*handles, DdpRefusal(module, engine)])
    _registry.add(engine)
    return engine


def _create_deferred(
    materializer: Materializer,
    parameters: list[tuple[str, torch.Tensor, int, int, bool]],
    options: _C.Options,
    group: Any,
    found: Found,
) -> _C.Engine:
    names: list[list[str]] = [[] for _ in found.names]
    for name, _, _, index, _ in parameters:
        names[index].append(name)

    def materialize(unit: int) -> list[torch.Tensor]:
        wanted = names[unit]
        values = materializer.materialize(wanted)
        return [values[name] for name in wanted]

    order = materializer.order(names)
    engine = _C.Engine.create(parameters, [], options, group, found.names, materialize, order)
    materializer.finish()
    engine.broadcast(list(materializer.module.buffers()), 0)
    return engine


def watch(target: Any, engine: _C.Engine, collected: Collected) -> ModuleWatch | None:
    """Watches a module's parameters; None for a bare iterable of parameters."""
    if not isinstance(target, nn.Module):
        return None
    watch = ModuleWatch(target, engine, collected.ignored)
    _registry.add_watch(engine, watch)
    return watch
