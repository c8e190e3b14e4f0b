"""Which torch.optim classes may run on shards: those that treat each element alone.

Known others are refused with their reason. The rest are probed: two steps on small tensors, once
whole and once as halves, must give the same.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch

REFUSED = {
    "LBFGS": "its line search and history need the whole model's gradient",
    "Adafactor": "its second moments are factored over the rows and columns of a matrix",
    "Muon": "it orthogonalizes whole matrices",
    "Shampoo": "it preconditions whole matrices",
    "SOAP": "it preconditions whole matrices",
    "LAMB": "its trust ratio needs the norm of each whole parameter",
    "Lamb": "its trust ratio needs the norm of each whole parameter",
    "LARS": "its trust ratio needs the norm of each whole parameter",
    "Lars": "its trust ratio needs the norm of each whole parameter",
    "SparseAdam": "it needs sparse gradients, and reduced gradients are dense",
    "ZeroOptimizer": "it shards already",
    "ZeroRedundancyOptimizer": "it shards already",
}

_SHAPES = ((4, 6), (5,))
_TOLERANCE = 1e-5  # of the largest update; a dependence on other elements shows far above
_ROUNDING = 1e-14  # of the values, which are float64 and about 1


@dataclass(frozen=True)
class Traits:
    """What the probe learned: defaults of a group, and the state that is one value a parameter."""

    defaults: dict[str, Any]
    per_parameter: frozenset[str]


def examine(
    cls: Any, hyperparameters: dict[str, Any], device: torch.device | None = None
) -> Traits:
    """Raises TypeError or ValueError, with the reason, for a class that can't run on shards.

    It is tried on ``device`` (default: cpu), since some hyper-parameters are of one kind of device.
    """
    device = torch.device("cpu") if device is None or device.type == "meta" else device
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        raise TypeError(
            'expected optimizer to be "adamw", "adam", "sgd", "lion" or a torch.optim.Optimizer '
            f"class, got {cls!r}"
        )
    for kind in cls.__mro__:
        if kind.__name__ in REFUSED:
            raise ValueError(
                f"optimizer {cls.__name__} can't run on shards: {REFUSED[kind.__name__]}"
            )
    on_gpu = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on_gpu), torch.enable_grad():
        return _probe(cls, hyperparameters, device)


def _probe(
    cls: type[torch.optim.Optimizer], hyperparameters: dict[str, Any], device: torch.device
) -> Traits:
    start = [_values(shape, 1.0 + i, device) for i, shape in enumerate(_SHAPES)]
    whole = [torch.nn.Parameter(values.clone()) for values in start]
    halves = [
        [torch.nn.Parameter(piece.clone()) for piece in pieces]
        for pieces in zip(*(values.flatten().tensor_split(2) for values in start), strict=True)
    ]
    try:
        together = cls(whole, **hyperparameters)
        apart = [cls(half, **hyperparameters) for half in halves]
    except TypeError as error:
        raise TypeError(
            f"{cls.__name__}{inspect.signature(cls)} was not made with "
            f"{hyperparameters or 'its defaults'}: {error}"
        ) from error
    try:
        for step in (1, 2):
            gradients = [
                _values(values.shape, 10.0 * step + i, device) for i, values in enumerate(start)
            ]
            gradients[1] *= 100.0  # a norm over everything would be its norm
            _step(together, whole, gradients)
            pieces = zip(*(g.flatten().tensor_split(2) for g in gradients), strict=True)
            for optimizer, half, piece in zip(apart, halves, pieces, strict=True):
                _step(optimizer, half, list(piece))
    except Exception as error:
        raise ValueError(
            f"optimizer {cls.__name__} can't run on shards: it failed on a small tensor ({error})"
        ) from error
    _compare(cls, start, whole, halves)
    return Traits(dict(together.defaults), _per_parameter(cls, together, whole[0]))


def _values(shape: Any, seed: float, device: torch.device) -> torch.Tensor:
    """Uneven values of both signs that need no random numbers."""
    count = torch.Size(shape).numel()
    steps = torch.arange(1, count + 1, dtype=torch.float64, device="cpu")
    return (torch.sin(steps * (1.7 + seed)) * (0.3 + 0.1 * steps)).view(shape).to(device)


def _step(optimizer: Any, parameters: list[Any], gradients: list[torch.Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    optimizer.step()


def _compare(
    cls: Any, start: list[torch.Tensor], whole: list[Any], halves: list[list[Any]]
) -> None:
    for i, values in enumerate(start):
        update = (whole[i].detach() - values).flatten()
        pieces = torch.cat([half[i].detach() for half in halves]) - values.flatten()
        difference = (update - pieces).abs().max().item()
        allowed = _TOLERANCE * update.abs().max().item() + _ROUNDING
        if not difference <= allowed:
            raise ValueError(
                f"optimizer {cls.__name__} can't run on shards: it updated two halves of a tensor "
                f"otherwise than the whole (by up to {difference:.3g}), so it is not elementwise"
            )


def _per_parameter(cls: Any, optimizer: Any, parameter: torch.Tensor) -> frozenset[str]:
    keys = set()
    if any(not isinstance(key, torch.Tensor) for key in optimizer.state):
        raise ValueError(
            f"optimizer {cls.__name__} can't run on shards: it keeps state that belongs to no "
            "parameter"
        )
    for key, value in optimizer.state.get(parameter, {}).items():
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            keys.add(key)
        elif value.shape != parameter.shape:
            raise ValueError(
                f"optimizer {cls.__name__} can't run on shards: its state '{key}' has shape "
                f"{tuple(value.shape)} for a parameter of shape {tuple(parameter.shape)}"
            )
    return frozenset(keys)
