"""``step_in_backward`` from Python: where the engine gets its rules, and what is refused then."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from . import _C, native

if TYPE_CHECKING:
    from .optimizer import ZeroOptimizer


def check_rule(optimizer: Any) -> None:
    """Raises ValueError for a rule that can't step a bucket by itself. Before any communication."""
    if not isinstance(optimizer, str):
        name = getattr(optimizer, "__name__", repr(optimizer))
        raise ValueError(
            'expected optimizer to be "adamw", "adam", "sgd" or "lion" with step_in_backward, got '
            f"{name}, which steps all parameters at once; leave step_in_backward out"
        )


def install(optimizer: ZeroOptimizer) -> None:
    """Backward asks for the optimizer's hyper-parameters when it begins."""
    # Weakly: the engine holds the function in C++, where the garbage collector can't see it.
    reference = weakref.ref(optimizer)

    def rules() -> list[native.CppRule]:
        alive = reference()
        if alive is None:
            raise RuntimeError(
                "the ZeroOptimizer of a model with step_in_backward is gone, and backward would "
                "step it; make a new one, or unwrap the model"
            )
        assert isinstance(alive._rule, native.NativeRule)
        return alive._rule.rules(alive.param_groups)

    optimizer._live.set_rule_source(rules)
    # So that GradScaler leaves its part of the step to the optimizer, which refuses it.
    optimizer._step_supports_amp_scaling = True


def refuse_scaler(engine: _C.Engine, optimizer: ZeroOptimizer) -> None:
    """Raises RuntimeError inside the step of an enabled GradScaler."""
    if not engine.options.step_in_backward or not hasattr(optimizer, "grad_scale"):
        return
    for name in ("grad_scale", "found_inf"):
        vars(optimizer).pop(name, None)
    raise RuntimeError(
        "GradScaler can't be used with step_in_backward: gradients would be unscaled after "
        "backward, and each was stepped, scaled, while backward ran; leave one of them out, and "
        "load a checkpoint (bfloat16 needs no scaler)"
    )
