"""What a rank holds and has sent, next to theory."""

from __future__ import annotations

from typing import Any

from . import _C

_FIELDS = ("held", "peak", "traffic", "theory")


class Report:
    """Numbers of one rank at one moment. Prints as a table.

    ``transport`` says how bytes travel between ranks: "host (shared buffers, process_vm_readv)",
    "group (gloo)".
    ``steps`` were taken; ``nonfinite_steps`` were not, because of an inf or NaN in a gradient
    (``on_nonfinite``), the last time in that of ``nonfinite_parameter``, the first such parameter.
    """

    transport: str
    steps: int
    nonfinite_steps: int
    nonfinite_parameter: str | None

    def __init__(self, engine: _C.Engine) -> None:
        self._numbers = engine.report()
        self._table = engine.report_table()
        self.transport = self._numbers["transport"]
        self.steps = self._numbers["steps"]
        self.nonfinite_steps = self._numbers["nonfinite_steps"]
        self.nonfinite_parameter = self._numbers["nonfinite_parameter"] or None

    def as_dict(self) -> dict[str, Any]:
        """``{"held", "peak", "traffic", "theory": {"held", "traffic"}}``, in bytes.

        ``held`` (now) and ``peak`` (since the last step began) have the keys ``parameters``,
        ``gradients``, ``optimizer_state`` and ``buffers``; ``traffic``, sent by this rank in the
        training steps so far, has ``reduce_scatter``, ``all_gather``, ``all_reduce`` and
        ``broadcast``; ``theory["traffic"]`` is for one step with one micro-batch. Padding is in
        what is held and sent, and not in theory.

        With replicas there is ``groups`` too: ``{"shard", "replicate", "theory": {"shard",
        "replicate"}}``, the same traffic and theory by the group that it is sent in.
        """
        fields = _FIELDS + (("groups",) if self._numbers["replicas"] > 1 else ())
        return {name: self._numbers[name] for name in fields}

    def __str__(self) -> str:
        return self._table

    def __repr__(self) -> str:
        return self._table


def report(target: Any) -> Report:
    """What this rank holds and has sent, for a ``ZeroOptimizer`` or a ``ZeroModule``.

    Not collective. Raises TypeError for anything else.
    """
    engine = getattr(target, "_engine", None)
    if not isinstance(engine, _C.Engine):
        raise TypeError(f"expected a ZeroOptimizer or a ZeroModule, got {type(target).__name__}")
    return Report(engine)
