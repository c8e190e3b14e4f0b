"""Uneven data: ranks whose batches end at different steps."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator

from .optimizer import ZeroOptimizer

_open = threading.local()


@contextlib.contextmanager
def join(
    optimizers: ZeroOptimizer | Iterable[ZeroOptimizer], *, average_over: str = "active"
) -> Iterator[None]:
    """Around the training loop: ranks may run out of batches at different steps.

        with zero.join(opt):
            for x, y in batches_of_this_rank:
                F.cross_entropy(model(x), y).backward()
                opt.step(); opt.zero_grad()

    A rank whose loop has ended takes part in what the others do, with no gradient of its own and
    with their hyper-parameters, until all have ended; then weights, optimizer state and step counts
    are equal on all ranks. A rank may have no batch at all. What it accumulated in ``no_sync()``
    before its end counts in the next reduction.

    ``optimizers``: one, or all that are stepped in the body. ``average_over``: what gradients are
    divided by, ``"active"``, the number of ranks that contribute, or ``"all"``, the number of ranks
    (those that don't contribute count as zero). Each thing that the ranks do together costs one
    more small message inside.

    Collective. Inside, parameters and sharded gradients are not written by hand, and
    ``GradScaler`` is refused: NotImplementedError. State dicts, ``full_param`` and other things
    that need all ranks raise RuntimeError once a rank has ended. When the body of one rank is left
    by an exception, or ranks do different things, the others raise RuntimeError with its number.
    Raises ValueError for another ``average_over``, one that differs between ranks, and a join
    inside another.
    """
    given = [optimizers] if isinstance(optimizers, ZeroOptimizer) else list(optimizers)
    _check(given, average_over)
    try:
        for optimizer in given:
            optimizer._live.begin_join(average_over == "active")
        _open.join = True
        with contextlib.ExitStack() as told:
            for optimizer in given:
                told.enter_context(_told_of_scalers(optimizer))
            yield
    except BaseException as error:
        for optimizer in given:
            optimizer._live.fail_join(f"{type(error).__name__}: {error}")
        raise
    finally:
        _open.join = False
    _shadow(given)


def _check(optimizers: list[ZeroOptimizer], average_over: str) -> None:
    if not optimizers:
        raise ValueError("expected an optimizer to join, got none")
    for optimizer in optimizers:
        if not isinstance(optimizer, ZeroOptimizer):
            raise TypeError(f"expected a ZeroOptimizer, got {type(optimizer).__name__}")
    if average_over not in ("active", "all"):
        raise ValueError(f'expected average_over to be "active" or "all", got {average_over!r}')
    if getattr(_open, "join", False):
        raise ValueError(
            "expected no zero.join inside another; give one join all the optimizers: "
            "zero.join([opt_a, opt_b])"
        )


@contextlib.contextmanager
def _told_of_scalers(optimizer: ZeroOptimizer) -> Iterator[None]:
    """Inside, GradScaler says in ``step`` that it is there."""
    before = getattr(optimizer, "_step_supports_amp_scaling", False)
    optimizer._step_supports_amp_scaling = True
    try:
        yield
    finally:
        optimizer._step_supports_amp_scaling = before


def _shadow(optimizers: list[ZeroOptimizer]) -> None:
    """Each optimizer's ranks by themselves: they take turns as the body has it."""
    errors: list[BaseException] = []

    def shadow(optimizer: ZeroOptimizer) -> None:
        try:
            optimizer._live.shadow_join(optimizer._follow_step)
        except BaseException as error:
            errors.append(error)

    others = [
        threading.Thread(target=shadow, args=(optimizer,), daemon=True)
        for optimizer in optimizers[1:]
    ]
    for thread in others:
        thread.start()
    shadow(optimizers[0])
    for thread in others:
        thread.join()
    if errors:
        raise errors[0]
