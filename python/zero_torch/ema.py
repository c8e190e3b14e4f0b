"""A sharded exponential moving average of the weights."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from . import _C
from ._wire import on_rank_0
from .inspect import engine_of
from .optimizer import ZeroOptimizer
from .state import given


class EMA:
    """The average of a model's weights over training, each rank of what it updates.

    After each ``opt.step()`` call ``update()``: average = decay * average + (1 - decay) * weights.
    It starts at the weights that the model has when it is made. ``target``: a ``ZeroOptimizer`` or
    the model that was sharded. Averages are of fp32 for 16-bit parameters (of their fp32 masters,
    where they have any), and take 4/N bytes per parameter on each of N ranks at stages 1 to 3, 4 at
    stage 0, where ``torch.optim.swa_utils.AveragedModel`` needs a whole second model. Frozen
    parameters are their own average; buffers are the model's. To follow a schedule set ``decay``.

    ``with ema.swapped():`` evaluates (or saves) with the averages. Raises TypeError for another
    target, ValueError for a decay outside [0, 1).
    """

    def __init__(self, target: ZeroOptimizer | nn.Module, decay: float = 0.999) -> None:
        self._engine = target._live if isinstance(target, ZeroOptimizer) else engine_of(target)
        self._core = _C.EMA(self._engine, float(decay))

    @property
    def decay(self) -> float:
        """The weight of the old average, from the next ``update()`` on."""
        return self._core.decay

    @decay.setter
    def decay(self, value: float) -> None:
        self._core.decay = float(value)

    @property
    def updates(self) -> int:
        """How often ``update()`` was called."""
        return self._core.updates

    def update(self) -> None:
        """Takes the present weights in. Not collective; RuntimeError inside ``swapped()``."""
        self._core.update()

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Inside, the model's parameters are the averages. Collective, and so is its end.

        Whatever reads the model then (``forward``, ``state_dict``, ``full_param``) sees averages;
        ``step`` raises RuntimeError. Afterwards the weights are back, bit for bit.
        """
        if self._core.swapped:
            raise RuntimeError("expected swapped() not to be nested, got a second one inside")
        self._core.swap()
        try:
            yield
        finally:
            self._core.swap()

    def average(self, parameter: torch.Tensor) -> torch.Tensor:
        """The whole average of one parameter. Collective at stages 1 to 3."""
        return self._core.average(self._index_of(parameter))

    def state_dict(self, rank0_only: bool = True) -> dict[str, Any]:
        """``{"decay", "updates", "averages": {name: whole tensor}}`` on rank 0, elsewhere ``{}``.

        Or on every rank. Collective at stages 1 to 3; other ranks hold one average at a time.
        """
        keep = not rank0_only or self._engine.rank == 0
        averages = {}
        for index in range(self._engine.parameter_count()):
            whole = self._core.average(index)
            if keep:
                averages[self._engine.parameter(index)[0]] = whole
        if not keep:
            return {}
        return {"decay": self.decay, "updates": self.updates, "averages": averages}

    def load_state_dict(self, state_dict: dict[str, Any] | None, rank0_only: bool = True) -> None:
        """Takes what ``state_dict`` gave, at any stage and number of ranks.

        With ``rank0_only`` rank 0's goes to all ranks: collective. Otherwise every rank passes the
        same. Raises ValueError, on every rank, for missing or unexpected names and other shapes.
        """
        if not rank0_only:
            averages = self._checked(state_dict)
            for index in range(self._engine.parameter_count()):
                self._core.load(index, averages[self._engine.parameter(index)[0]])
            self._take_settings(given(state_dict))
            return
        on_rank_0(self._engine, lambda: len(self._checked(state_dict)))
        for index in range(self._engine.parameter_count()):
            name, parameter, _ = self._engine.parameter(index)
            whole = torch.empty_like(parameter, dtype=_dtype_of(parameter), requires_grad=False)
            if self._engine.rank == 0:
                whole.copy_(given(state_dict)["averages"][name])
            self._engine.broadcast([whole], 0)
            self._core.load(index, whole)
        self._take_settings(on_rank_0(self._engine, lambda: _settings(given(state_dict))))

    def _checked(self, state_dict: dict[str, Any] | None) -> dict[str, torch.Tensor]:
        averages: dict[str, torch.Tensor] = given(state_dict)["averages"]
        mine = [self._engine.parameter(i) for i in range(self._engine.parameter_count())]
        shapes = {name: tuple(parameter.shape) for name, parameter, _ in mine}
        missing = sorted(set(shapes) - set(averages))
        unexpected = sorted(set(averages) - set(shapes))
        other = [
            f"'{name}' {tuple(averages[name].shape)} instead of {shape}"
            for name, shape in shapes.items()
            if name in averages and tuple(averages[name].shape) != shape
        ]
        if missing or unexpected or other:
            raise ValueError(
                f"expected the averages of this model's parameters, got missing {missing}, "
                f"unexpected {unexpected}, other shapes {other}"
            )
        return averages

    def _take_settings(self, settings: dict[str, Any]) -> None:
        self._core.decay, self._core.updates = settings["decay"], settings["updates"]

    def _index_of(self, parameter: torch.Tensor) -> int:
        index = self._engine.index_of(parameter)
        if index < 0:
            raise ValueError(
                "expected a parameter that the optimizer manages, got another tensor of shape "
                f"{tuple(parameter.shape)}"
            )
        return index

    def __repr__(self) -> str:
        return f"EMA(decay={self.decay}, updates={self.updates})"


def _settings(state_dict: dict[str, Any]) -> dict[str, Any]:
    return {"decay": float(state_dict["decay"]), "updates": int(state_dict["updates"])}


def _dtype_of(parameter: torch.Tensor) -> torch.dtype:
    return torch.float32 if parameter.dtype.itemsize == 2 else parameter.dtype
