"""What ``.grad`` is at stages 1 and 2 once it was reduced: a tensor that stands for the shard.

It has the parameter's shape, dtype and device but only this rank's part of the values. What acts on
each element alone (zeroing, scaling, clamping, GradScaler's unscale-and-check) acts on the shard;
anything that needs the whole raises an error that names the parameter and the remedy.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from . import _C

aten = torch.ops.aten


class ShardedGradient(torch.Tensor):
    """The reduced gradient of one parameter, of which this rank holds a part.

    Made by the library and found in ``.grad``. ``zero_torch.full_grad(p)`` gives the whole.
    """

    _engine: weakref.ref[_C.Engine]
    _index: int
    _name: str

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls,
        engine: weakref.ref[_C.Engine],
        index: int,
        name: str,
        like: torch.Tensor,
        dtype: torch.dtype,
    ) -> ShardedGradient:
        self: ShardedGradient = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=dtype, device=like.device
        )
        # Weakly: the engine holds this tensor in C++, where the garbage collector can't see it.
        self._engine, self._index, self._name = engine, index, name
        return self

    def __init__(self, *_: Any) -> None:
        pass

    def shard(self) -> torch.Tensor:
        """This rank's part: one-dimensional, a view; empty when it has no part."""
        return self._live_engine("reading its shard").shard_gradient(self._index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        engine = self._engine()
        where = "no engine" if engine is None else f"rank {engine.rank} of {engine.world_size}"
        return (
            f"ShardedGradient(parameter='{self._name}', shape={tuple(self.shape)}, "
            f"dtype={self.dtype}, {where})"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        self._refuse("copying it")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        self._refuse("saving it")

    def numpy(self, *, force: bool = False) -> NoReturn:
        self._refuse("numpy()")

    def tolist(self) -> NoReturn:
        self._refuse("tolist()")

    def data_ptr(self) -> NoReturn:
        self._refuse("data_ptr()")

    def untyped_storage(self) -> NoReturn:
        self._refuse("untyped_storage()")

    def _live_engine(self, operation: str) -> _C.Engine:
        engine = self._engine()
        if engine is None:
            raise RuntimeError(
                f"gradient of parameter '{self._name}' was sharded by a ZeroOptimizer or "
                f"ZeroModule that is gone: {operation} is no longer possible; set .grad to None"
            )
        return engine

    def _refuse(self, operation: str) -> NoReturn:
        engine = self._live_engine(operation)
        raise RuntimeError(
            f"gradient of parameter '{self._name}' is sharded (rank {engine.rank} of "
            f"{engine.world_size}): {operation} needs the whole gradient; clip with "
            "optimizer.clip_grad_norm_, read with zero_torch.full_grad(p), "
            "step with zero_torch.ZeroOptimizer"
        )

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        handler = _HANDLERS.get(func)
        if handler not in (None, _alias):
            _refuse_in_join(func, _first(args, kwargs))
        result = NotImplemented if handler is None or kwargs else handler(func, args)
        if result is NotImplemented:
            _first(args, kwargs)._refuse(str(func))
        return result


def install(engine: _C.Engine) -> None:
    """Gives the engine one stand-in per parameter, where its stage shards gradients."""
    if engine.options.stage == 0:
        return
    reference = weakref.ref(engine)
    stand_ins: list[torch.Tensor] = []
    for index in range(engine.parameter_count()):
        name, parameter, _ = engine.parameter(index)
        # Reduced gradients of fp32 masters count as fp32: GradScaler refuses those of fp16.
        dtype = torch.float32 if engine.has_master(index) else parameter.dtype
        stand_ins.append(ShardedGradient(reference, index, name, parameter, dtype))
    engine.set_gradient_stand_ins(stand_ins)


def _refuse_in_join(func: Any, gradient: ShardedGradient) -> None:
    """A rank whose data has ended would not do the same to its part."""
    if not gradient._live_engine(str(func)).joining():
        return
    if func is aten._amp_foreach_non_finite_check_and_unscale_.default:
        refuse_scaler()
    raise NotImplementedError(
        f"gradient of parameter '{gradient._name}': {func} inside zero.join is not built, because "
        "ranks whose data has ended could not follow; use optimizer.clip_grad_norm_, "
        "clip_grad_value_ or zero_grad, or scale the loss"
    )


def refuse_scaler() -> NoReturn:
    raise NotImplementedError(
        "torch.amp.GradScaler inside zero.join is not built: the scale of a rank whose data has "
        "ended would stand still; train without one, in bfloat16 or float32"
    )


def _first(args: Sequence[Any], kwargs: dict[str, Any] | None) -> ShardedGradient:
    for leaf in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(leaf, ShardedGradient):
            return leaf
    raise AssertionError("dispatched without a ShardedGradient")


def _is_scalar(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.dim() == 0 and not isinstance(value, ShardedGradient)
    return isinstance(value, int | float)


def _shard(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.shard() if isinstance(tensor, ShardedGradient) else tensor


# Handlers return NotImplemented to refuse; the result otherwise (None of operations without one).


def _alias(func: Callable[..., Any], args: Sequence[Any]) -> torch.Tensor:
    gradient: ShardedGradient = args[0]
    return ShardedGradient(
        gradient._engine, gradient._index, gradient._name, gradient, gradient.dtype
    )


def _in_place(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    target, *scalars = args
    given = [scalar for scalar in scalars if scalar is not None]  # a bound of clamp_ may lack
    if not isinstance(target, ShardedGradient) or not all(map(_is_scalar, given)):
        return NotImplemented
    func(target.shard(), *scalars)
    return target


def _foreach(func: Callable[..., Any], args: Sequence[Any]) -> Any:
    targets, *scalars = args
    if not all(map(_is_scalar, scalars)):
        return NotImplemented
    func([_shard(target) for target in targets], *scalars)
    return None


def _unscale(func: Callable[..., Any], args: Sequence[Any]) -> None:
    targets, found_inf, inverse_scale = args
    func([_shard(target) for target in targets], found_inf, inverse_scale)
    engines = {
        t._engine: t._live_engine("unscaling it") for t in targets if type(t) is ShardedGradient
    }
    # An overflow in anyone's shard must be everyone's, or ranks would part at the next step.
    for engine in engines.values():
        engine.agree_nonfinite(found_inf)


_HANDLERS: dict[Any, Callable[[Callable[..., Any], Sequence[Any]], Any]] = {
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.zero_.default: _in_place,
    aten.mul_.Tensor: _in_place,
    aten.mul_.Scalar: _in_place,
    aten.div_.Tensor: _in_place,
    aten.div_.Scalar: _in_place,
    aten.clamp_.default: _in_place,
    aten.clamp_min_.default: _in_place,
    aten.clamp_max_.default: _in_place,
    aten._foreach_zero_.default: _foreach,
    aten._foreach_mul_.Scalar: _foreach,
    aten._foreach_mul_.Tensor: _foreach,
    aten._foreach_div_.Scalar: _foreach,
    aten._foreach_div_.Tensor: _foreach,
    aten._foreach_clamp_min_.Scalar: _foreach,
    aten._foreach_clamp_max_.Scalar: _foreach,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
