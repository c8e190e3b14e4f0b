"""Checkpoints: a directory that loads at any number of ranks and any stage."""

from __future__ import annotations

import atexit
import os
import warnings
from typing import Any

import torch
from torch import nn

from . import _C, _extra_state, _names, _random_states, _registry, _weights, _wire
from ._distributed_state import SavedOptimizer
from ._manifest_json import from_json, to_exact_json, to_json
from .ema import EMA
from .inspect import engines_of
from .optimizer import ZeroOptimizer

Path = str | os.PathLike[str]


@_wire.collective("zero_torch.save")
def save(
    directory: Path,
    model: nn.Module,
    opt: ZeroOptimizer | None = None,
    extra: Any = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    ema: EMA | None = None,
    keep_last: int | None = None,
) -> None:
    """Saves a model, sharded or not, and its optimizer, each rank its share. Collective.

    ``directory`` is made, or replaced if it is a checkpoint: what is on the disk is the old or the
    new one at every moment, and stays the old one where any rank fails; all raise then. It holds
    safetensors files with the parameters (fp32 masters, where there are any), buffers and the
    optimizer's state under the parameters' names, and ``manifest.json`` with param groups, step
    counts, random states of the ranks (torch's, Python's, NumPy's), rank 0's extra state of modules
    (``get_extra_state``: of numbers, strings, None, bytes, tensors, lists, tuples and dicts), the
    ``scaler`` and ``extra``: numbers, strings, None, lists and dicts of these with str keys (a
    scheduler's state dict).

    ``ema``: its averages, decay and count of updates too, in the optimizer's files. RuntimeError
    inside its ``swapped()``.

    ``keep_last``: deletes older checkpoints beside this one, whose names differ from its name in
    their number only (``step-1000``), until so many are left.

    Ranks share the file system. Takes no memory beyond one tensor. Waits for an ``async_save`` of
    the model first. Raises TypeError for an ``extra`` or hyper-parameter that JSON has no form for,
    ValueError for a directory that holds something else, RuntimeError or OSError (disk full) on
    every rank.
    """
    _C.save_checkpoint(*_arguments(directory, model, opt, extra, scaler, ema, keep_last))


@_wire.collective("zero_torch.async_save")
def async_save(
    directory: Path,
    model: nn.Module,
    opt: ZeroOptimizer | None = None,
    extra: Any = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    ema: EMA | None = None,
    keep_last: int | None = None,
) -> _C.BackgroundSave:
    """``save`` that returns once each rank has copied its share; threads write it. Collective.

    Training may go on at once: what is saved is the model at the moment of the call. Takes the
    memory of this rank's shards (parameters and state) until it is written. The directory is a
    checkpoint when every rank has finished and flushed, not before.

    Returns a handle: ``wait()`` blocks until the checkpoint is on the disk, and raises what went
    wrong, on every rank; ``done()`` says whether it has ended. An error that nobody waited for is
    raised by the next ``save``, ``async_save`` or ``load`` of the model, on every rank; these wait
    for the save in the background, and so does the end of the process.
    """
    arguments = _arguments(directory, model, opt, extra, scaler, ema, keep_last)
    return _C.async_save_checkpoint(*arguments)


atexit.register(_C.finish_background_saves)


def _arguments(
    directory: Path,
    model: nn.Module,
    opt: ZeroOptimizer | None,
    extra: Any,
    scaler: torch.amp.GradScaler | None,
    ema: EMA | None,
    keep_last: int | None,
) -> tuple[Any, ...]:
    """Of the core's two saves. Collective."""
    engine = _engine_of(model, opt)
    if keep_last is not None and (isinstance(keep_last, bool) or keep_last < 1):
        raise ValueError(f"expected keep_last to be at least 1, or None, got {keep_last!r}")
    extra_text = to_json("extra", extra)
    foreign: list[tuple[int, str, torch.Tensor]] = []
    optimizer: dict[str, Any] | None = None
    if opt is not None:
        foreign = opt._rule.shards()
        optimizer = _describe_optimizer(opt)
    if ema is not None:
        foreign = foreign + _C.averages_of(_core_of(ema), engine)
    scalars: dict[str, Any] = {
        "rng": _random_states.of_all(engine),
        "scaler": None if scaler is None else scaler.state_dict(),
        "ema": None if ema is None else {"decay": ema.decay, "updates": ema.updates},
        "extra_state": to_exact_json("extra_state", _extra_state.of(model)),
    }
    texts = (to_json("param_groups", optimizer), to_json("scaler", scalars), extra_text)
    native = opt is not None and opt._name is not None
    return (
        os.fspath(directory),
        engine,
        native,
        _loose(model, engine),
        foreign,
        _tied(model),
        texts,
        keep_last or 0,
        _C.PART_BYTES,
    )


@_wire.collective("zero_torch.load")
def load(
    directory: Path,
    model: nn.Module,
    opt: ZeroOptimizer | None = None,
    *,
    scaler: torch.amp.GradScaler | None = None,
    ema: EMA | None = None,
    strict: bool = True,
    verify: bool = True,
    rng: bool = True,
) -> Any:
    """Loads what ``save`` saved, at any number of ranks and any stage; returns ``extra``.

    Or a model that others saved: a safetensors file, Hugging Face's index of several or a folder of
    them; a file of ``torch.save`` with a state dict, or with one under "model" or "state_dict"; a
    directory of ``torch.distributed.checkpoint``, of which ``opt`` is loaded too, if given. Each
    rank reads it, one tensor after the other, and keeps what it holds. Masters get its exact
    values, and the state of an optimizer that is not given stays; returns None.

    Collective: each rank reads what it holds. With ``opt`` its param groups, step counts and state
    come along; without, the optimizer's files are not looked at, and rank 0 warns where the model
    has an optimizer. ``ema`` gets the averages, decay and count of updates that were saved, else
    ValueError; parameters that had no average then start at their loaded values. ``rng``: ranks
    that saved get their random states back. ``verify``: checksums are compared first, shared out
    among the ranks.

    Raises ValueError on every rank, before anything is changed: all missing and unexpected names
    (``strict=False`` leaves those alone) and other shapes in one error; files that are damaged or
    missing, by name; param groups of other parameters, state of another rule.
    """
    engine = _engine_of(model, opt)
    if _weights.found_at(directory):
        saved: list[SavedOptimizer] = []
        if opt is not None and _weights.has_optimizer(directory):
            _wire.on_all(opt._live, lambda: saved.append(SavedOptimizer(directory, opt)))
        elif opt is not None:
            raise ValueError(
                f"expected a checkpoint of zero_torch.save in '{os.fspath(directory)}' to load an "
                "optimizer from, got files of weights; leave opt out: masters are loaded with the "
                "model, and its state stays"
            )
        _weights.load(directory, engine, (_loose(model, engine), _tied(model)), strict)
        if opt is not None:
            _wire.on_all(opt._live, saved[0].load)
        return None
    checkpoint = _C.Checkpoint(os.fspath(directory), engine)
    scalars = from_json(checkpoint.scalars) or {}
    extra_state = from_json(scalars.get("extra_state", "{}"))
    if strict:
        _extra_state.check(model, extra_state, os.fspath(directory))
    loader = None
    _warn_of_fresh(engine, opt, checkpoint.optimizer)
    if ema is not None:
        checkpoint.require_averages(_core_of(ema), engine)
    if opt is not None:
        loader = _OptimizerLoader(checkpoint, opt, directory)
    if verify and (opt is not None or ema is not None):
        checkpoint.verify_state(engine)
    checkpoint.load_model(engine, _loose(model, engine), strict, verify)
    _extra_state.load(model, extra_state)
    if loader is not None:
        loader.load()
    if ema is not None:
        checkpoint.load_averages(_core_of(ema))
    if scaler is not None and scalars.get("scaler") is not None:
        scaler.load_state_dict(scalars["scaler"])
    if rng:
        states = scalars.get("rng") or []
        rank = 0 if engine is None else engine.rank
        if rank < len(states):
            _random_states.restore(states[rank], engine)
    return from_json(checkpoint.extra)


def latest(parent: Path) -> str | None:
    """The path of the newest complete checkpoint in a folder: by the number in its name.

    By time where names have none, or different prefixes. None where there is none. Not collective.
    """
    return _C.latest_checkpoint(os.fspath(parent))


def _engine_of(model: nn.Module, opt: ZeroOptimizer | None) -> _C.Engine | None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"expected model to be an nn.Module, got {type(model).__name__}")
    if opt is not None and not isinstance(opt, ZeroOptimizer):
        raise TypeError(f"expected opt to be a ZeroOptimizer or None, got {type(opt).__name__}")
    engines = engines_of(model)
    if len(engines) > 1:
        raise ValueError(
            f"expected a model that one ZeroOptimizer or ZeroModule manages, got {len(engines)} of "
            "them in it; save its parts by themselves"
        )
    engine = engines[0] if engines else None
    if opt is not None and opt._live is not engine:
        raise ValueError("expected opt to be the optimizer of the model, got one of another")
    if engine is not None:
        for name, parameter in _names.named_parameters(model):
            index = engine.index_of(parameter)
            if index >= 0 and engine.parameter(index)[0] != name:
                raise ValueError(
                    f"expected the module that was sharded, got one in which parameter "
                    f"'{engine.parameter(index)[0]}' is '{name}'"
                )
    return engine


def _warn_of_fresh(engine: _C.Engine | None, opt: ZeroOptimizer | None, saved: str) -> None:
    """On rank 0, where the model has an optimizer whose state was saved and is not asked for."""
    if opt is not None or engine is None or engine.rank != 0 or from_json(saved) is None:
        return
    if _registry.optimizer_of(engine) is not None:
        warnings.warn(
            "the checkpoint's optimizer is not loaded: the optimizer of this model keeps the state "
            "that it has; pass opt to zero_torch.load to load it too",
            stacklevel=4,
        )


def _core_of(ema: EMA) -> _C.EMA:
    if not isinstance(ema, EMA):
        raise TypeError(f"expected ema to be a zero.EMA or None, got {type(ema).__name__}")
    return ema._core


def _loose(model: nn.Module, engine: _C.Engine | None) -> list[tuple[str, torch.Tensor, bool]]:
    """(name, tensor, whether it is a parameter) of what no engine holds: each once."""
    found: dict[int, tuple[str, torch.Tensor, bool]] = {}
    for name, parameter in _names.named_parameters(model):
        index = -1 if engine is None else engine.index_of(parameter)
        if engine is None or index < 0 or not engine.is_flat(index):
            found[id(parameter)] = (name, parameter.detach(), True)
    for prefix, part in _names.named_modules(model):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                name = _names.joined(prefix, key)
                found.setdefault(id(buffer), (name, buffer.detach(), False))
    return list(found.values())


def _tied(model: nn.Module) -> list[tuple[str, str]]:
    """(name, the first name of the same parameter or buffer), as in the state dict."""
    first: dict[int, str] = {}
    tied = []
    for name, parameter in _names.named_parameters(model, remove_duplicate=False):
        if first.setdefault(id(parameter), name) != name:
            tied.append((name, first[id(parameter)]))
    for prefix, part in _names.named_modules(model, remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and key not in part._non_persistent_buffers_set:
                name = _names.joined(prefix, key)
                if first.setdefault(id(buffer), name) != name:
                    tied.append((name, first[id(buffer)]))
    return tied


def _describe_optimizer(opt: ZeroOptimizer) -> dict[str, Any]:
    engine = opt._live
    names = {id(p): n for n, p, _ in map(engine.parameter, range(engine.parameter_count()))}
    groups = []
    for group in opt.param_groups:
        described = {key: value for key, value in group.items() if key != "params"}
        described["params"] = [names[id(p)] for p in group["params"]]
        groups.append(described)
    return {
        "rule": opt._rule.kind(),
        "groups": groups,
        "scalars": opt._rule.scalars(),
    }


class _OptimizerLoader:
    """Checks that what was saved fits the optimizer, then loads it."""

    def __init__(self, checkpoint: _C.Checkpoint, opt: ZeroOptimizer, directory: Path) -> None:
        self._checkpoint, self._opt = checkpoint, opt
        saved = from_json(checkpoint.optimizer)
        if saved is None:
            raise ValueError(
                f"expected an optimizer in '{os.fspath(directory)}', got a checkpoint that was "
                "saved without one; leave opt out to load the model alone"
            )
        self._saved = saved
        mine = _describe_optimizer(opt)["groups"]
        theirs = saved["groups"]
        for at in range(max(len(mine), len(theirs))):
            own = mine[at]["params"] if at < len(mine) else None
            other = theirs[at]["params"] if at < len(theirs) else None
            if own != other:
                raise ValueError(
                    f"expected param group {at} of '{os.fspath(directory)}' to hold the "
                    f"parameters that it has in this optimizer, {_shortened(own)}, got "
                    f"{_shortened(other)}"
                )
        names = {name for group in theirs for name in group["params"]}
        self._states = {name: checkpoint.state_of(name) for name in names}
        opt._rule.check_saved(self._states, saved["scalars"])

    def load(self) -> None:
        for group, saved in zip(self._opt.param_groups, self._saved["groups"], strict=True):
            for key, value in saved.items():
                if key == "params":
                    continue
                current = group.get(key)
                if isinstance(current, torch.Tensor):
                    current.fill_(value)
                else:
                    group[key] = tuple(value) if isinstance(current, tuple) else value
        self._opt._rule.load_saved(
            self._checkpoint, self._states, self._saved["scalars"], self._opt.param_groups
        )


def _shortened(names: list[str] | None) -> str:
    if names is None:
        return "no such group"
    return repr(names) if len(names) <= 4 else f"{names[:3]} and {len(names) - 3} more"
