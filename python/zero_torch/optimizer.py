"""ZeroOptimizer: a torch.optim.Optimizer whose step, state and gradients are sharded."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from inspect import unwrap as _unwrapped
from typing import Any, Literal, NoReturn, overload

import torch

from . import (
    _C,
    _habits,
    _hooks,
    _registry,
    comm_hooks,
    elementwise,
    gradients,
    inspect,
    native,
    packing,
    stepping,
)
from ._engine import make_engine, prepare, watch
from ._parameters import Collected, collect, collect_group
from ._watch import ModuleWatch
from .config import FIELDS, ZeroConfig, merged
from .foreign import ForeignRule
from .module import ZeroModule, no_sync

Rule = native.NativeRule | ForeignRule

# torch's, without the wrapper that imports torch._dynamo (70 MB and a second or two).
_add_param_group = _unwrapped(torch.optim.Optimizer.add_param_group)


class ZeroOptimizer(torch.optim.Optimizer):
    """Shards the training of a model in place and steps it. Use it as any torch optimizer.

    ``target``: an ``nn.Module``, a ``ZeroModule``, or an iterable of parameters, of (name,
    parameter) pairs or of param groups. The model is called as before; parameters keep their
    identity, names, shapes and strides. Frozen parameters may be among them. At stages 0-2
    dropping the optimizer gives a plain model back (a ``ZeroModule`` stays sharded).

    ``optimizer``: ``"adamw"``, ``"adam"`` or ``"sgd"`` (native and fused, with torch's defaults and
    formats), ``"lion"`` (native too; lr 1e-4, betas (0.9, 0.99), weight_decay 0, maximize), or an
    elementwise ``torch.optim`` class, which runs on the shards. ``lr`` and the
    other hyper-parameters are keyword arguments, as are the settings of ``ZeroConfig`` (put over
    ``config``). They are read from ``param_groups`` at each step, so schedulers work.
    ``param_groups``, at any stage: a list of groups of the module's parameters; each trainable one
    must be in one, and frozen ones that are in none become a last group.

    ``stage``: 0 replicates, 1 shards optimizer state, 2 gradients too, 3 parameters too (``target``
    must be a module; see ``ZeroModule``, to which the parameters belong then: they stay sharded
    when the optimizer is dropped, ``release()`` gives them back). ``init_fn`` and ``init_from``
    initialize a model without storage, as in ``ZeroModule``. ``process_group``: the ranks
    to shard over, a ProcessGroup or a DeviceMesh of one dimension, or of two, (replicate, shard),
    for hybrid sharding, as with ``shard_group`` and ``replicate_group``; by default
    torch.distributed's default group, made by ``zero_torch.init()`` when a launcher asks for
    several ranks and there is none yet; without a launcher one rank.

    Collective: all ranks construct it with equal arguments, and get rank 0's values of parameters
    and buffers. ``step``, ``clip_grad_norm_``, ``clip_grad_value_``, ``grad_norm``,
    ``add_param_group`` and ``synchronize`` are collective, at stages 1 to 3 ``state_dict`` too.

    Raises TypeError or ValueError, naming the argument and what is allowed, before any
    communication; NotImplementedError for a setting that the native rule lacks; ValueError on every
    rank, naming the first difference and both ranks, when ranks differ.
    """

    def __init__(
        self,
        target: Any,
        optimizer: str | type[torch.optim.Optimizer] = "adamw",
        *,
        stage: int | None = None,
        lr: float | torch.Tensor | None = None,
        param_groups: Any = None,
        process_group: Any = None,
        config: ZeroConfig | None = None,
        init_fn: Callable[[torch.nn.Module], None] | None = None,
        init_from: Any = None,
        **kw: Any,
    ) -> None:
        settings = {name: kw.pop(name) for name in FIELDS if name in kw}
        hyperparameters = kw if lr is None else {"lr": lr, **kw}
        self._engine: _C.Engine | None = None
        materializer = None
        if isinstance(target, ZeroModule):
            given = {"config": config, "process_group": process_group, **settings}
            given["param_groups"] = param_groups
            collected = _collect_wrapped(target, stage, given)
            in_backward = target._engine.options.step_in_backward
        else:
            if stage is None:
                raise TypeError("expected stage=0, 1, 2 or 3; ZeroOptimizer has no default stage")
            merged_config = merged(config, settings)
            in_backward = merged_config.step_in_backward
            materializer = prepare(target, stage, init_fn, init_from)
            collected = collect(
                target,
                merged_config.ignored_params,
                deferred=materializer is not None,
                groups=param_groups,
            )
        traits = None
        if isinstance(optimizer, str):
            _check_name(optimizer)
            defaults = native.defaults(optimizer, hyperparameters, FIELDS)
            for group in collected.groups:
                native.check_group(optimizer, {**defaults, **group})
        else:
            if in_backward:
                stepping.check_rule(optimizer)
            traits = elementwise.examine(
                optimizer,
                hyperparameters,
                collected.device if materializer is None else materializer.device,
            )
            defaults = traits.defaults
        super().__init__(collected.groups, defaults)
        if isinstance(target, ZeroModule):
            engine = target._engine
            self._watch: ModuleWatch | None = target._watch
        else:
            engine = make_engine(
                target, collected, merged_config, stage, process_group, materializer
            )
            if materializer is not None:
                for group, given_group in zip(self.param_groups, collected.groups, strict=True):
                    group["params"] = list(given_group["params"])
            self._watch = watch(target, engine, collected)
        self._rule: Rule
        if isinstance(optimizer, str):
            self._name: str | None = optimizer
            self._rule = native.NativeRule(engine, optimizer)
        else:
            assert traits is not None
            self._name = None
            self._rule = ForeignRule(engine, optimizer, hyperparameters, traits, self.param_groups)
        self._engine = engine
        half = any(p.dtype == torch.float16 for group in self.param_groups for p in group["params"])
        on_device = engine.device.type != "cpu" and self._name is not None and not in_backward
        if on_device or (half and engine.options.stage == 0):
            # A native step on a device leaves itself out, so GradScaler need not wait for it. And
            # GradScaler refuses `.grad` of fp16, whose range is too small to be unscaled in.
            self._step_supports_amp_scaling = True
        if in_backward:
            stepping.install(self)
        _registry.add_optimizer(engine, self)

    @overload
    def step(self, closure: None = None) -> None: ...
    @overload
    def step(self, closure: Callable[[], float]) -> float: ...
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """One step with the reduced gradients. Collective. Returns what ``closure`` returned.

        Reads hyper-parameters from ``param_groups``. At stages 1 and 2 the new values travel while
        the program goes on; what reads them waits. Raises RuntimeError for parameters that were
        added to the model since, by name. With ``on_nonfinite="skip"`` a gradient with an inf or
        NaN on any rank leaves weights and state on all ranks alone, with ``"raise"`` all of them
        raise RuntimeError with the first such parameter's name. With ``step_in_backward`` it ends
        the step that backward took.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._check_parameters()
        with torch.no_grad():
            if self._unscaled():
                self._rule.step(self.param_groups)
        return loss

    def _follow_step(self, hyperparameters: bytes) -> None:
        """A step that other ranks take by a torch.optim class, inside a join."""
        assert isinstance(self._rule, ForeignRule)
        with torch.no_grad():
            self._rule.follow(self.param_groups, hyperparameters)

    def _unscaled(self) -> bool:
        """Whether to step, after what GradScaler leaves to an optimizer that scales for itself."""
        stepping.refuse_scaler(self._live, self)
        scale, found_inf = getattr(self, "grad_scale", None), getattr(self, "found_inf", None)
        if found_inf is not None and self._live.joining():
            self.__dict__.pop("grad_scale")
            self.__dict__.pop("found_inf")
            gradients.refuse_scaler()
        if self._live.device.type != "cpu" and self._name is not None:
            if scale is not None:
                self._live.scale_gradients(scale.double().reciprocal().float())
            if found_inf is not None:
                self._live.leave_out_where(found_inf)
            return True
        if found_inf is not None and found_inf.item() > 0:
            return False
        if scale is not None:
            self._live.unscale(scale.double().reciprocal().float().item())
        return True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: ``.grad`` becomes None, or zeros of the parameter's shape. Not collective."""
        self._live.zero_grad(set_to_none)

    def clip_grad_norm_(
        self,
        max_norm: float | torch.Tensor,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
    ) -> torch.Tensor:
        """Scales all gradients so that their norm is at most ``max_norm``. Collective.

        Returns the norm of the whole gradient before: a 0-dim fp32 tensor, the same bits on every
        rank, at every stage and world size. ``norm_type``: any p > 0, or ``inf``. A norm that is
        not finite raises RuntimeError on all ranks with ``error_if_nonfinite``, before anything
        was scaled, with the name of the first parameter that has such a gradient.
        """
        norm = self._live.clip_grad_norm(float(max_norm), float(norm_type), error_if_nonfinite)
        return self._scalar(norm)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamps each element of the gradients to ``[-clip_value, clip_value]``. Collective."""
        self._live.clip_grad_value(float(clip_value))

    @overload
    def grad_norm(
        self, norm_type: float = 2.0, *, per_group: Literal[False] = False
    ) -> torch.Tensor: ...
    @overload
    def grad_norm(
        self, norm_type: float = 2.0, *, per_group: Literal[True]
    ) -> list[torch.Tensor]: ...
    def grad_norm(
        self, norm_type: float = 2.0, *, per_group: bool = False
    ) -> torch.Tensor | list[torch.Tensor]:
        """The norm of the whole gradient: a 0-dim fp32 tensor. Collective.

        With ``per_group`` a list of the norms of each param group, still in one exchange.
        """
        if not per_group:
            return self._scalar(self._live.grad_norm(float(norm_type)))
        norms = [self._scalar(norm) for norm in self._live.grad_norms(float(norm_type))]
        without_parameters = len(self.param_groups) - len(norms)
        return norms + [torch.zeros_like(norms[0]) for _ in range(without_parameters)]

    def register_comm_hook(self, hook: comm_hooks.CommHook) -> None:
        """Replaces the reduction of gradient buckets; ``None``: nothing does. Collective.

        ``"bf16"`` and ``"fp16"``: gradients of fp32 are rounded to 16 bits, sent and summed in
        fp32, which halves the reduce-scatter's bytes ("fp16" divides by the number of ranks before
        it rounds, so as not to overflow). A callable ``hook(bucket: GradientBucket)`` is called on
        the thread of backward, for one bucket after the other in an order that all ranks share, so
        it may call collectives of a group of its own, but not the optimizer. It returns the
        finished gradient (divided, if it is to be a mean), of the whole bucket or of this rank's
        shard, one-dimensional, of the bucket's dtype or fp32; or a ``torch.futures.Future`` of it.
        It should not refer to the model or the optimizer, which would never be freed.

        Raises ValueError on all ranks when their hooks have different names, RuntimeError inside
        backward. What the hook raises comes out of ``backward()``.
        """
        comm_hooks.register(self._live, hook)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates without traffic; whole gradients are held meanwhile."""
        with no_sync(self._live):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """False: backward accumulates without traffic until it is set to True again."""
        self._live.set_requires_gradient_sync(requires_gradient_sync)

    def divide_grad_(
        self, divisor: float | torch.Tensor, *, across_ranks: bool = False
    ) -> torch.Tensor:
        """Divides all gradients by ``divisor``, the same on every rank. Collective.

        With ``across_ranks`` by the sum of what the ranks give, and returns that (0-dim fp32): with
        ``average=False`` and a summed loss, ``divide_grad_(tokens, across_ranks=True)`` gives the
        mean over all ranks' tokens, however they are spread. To be called once a step, before
        clipping. Raises ValueError unless the divisor is finite and positive.
        """
        return self._scalar(self._live.divide_gradients(float(divisor), across_ranks))

    def synchronize(self) -> None:
        """Reduces what backward left unreduced and waits for every transfer. Collective."""
        self._live.synchronize()

    def release(self) -> None:
        """Gives the parameters back, whole and in memory of their own. Collective.

        The model is a plain module again, and this optimizer is of no use afterwards.
        """
        inspect.release(self._live)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """One more param group, as torch's. Collective: rank 0's values go to all ranks.

        The parameters may be new to the model. Raises as the constructor does.
        """
        if self._engine is None:  # the base class hands us the first groups
            _add_param_group(self, param_group)
            return
        names = {} if self._watch is None else self._watch.names()
        fixed = set() if self._watch is None else self._watch.keeps_dtype()
        collected = collect_group(param_group, len(self.param_groups), names)
        named = collected.named()
        if self._name is not None:
            native.check_group(self._name, {**self.defaults, **collected.groups[0]})
        _add_param_group(self, collected.groups[0])
        try:
            self._engine.add_parameters([(*item, 0, id(item[1]) in fixed) for item in named])
        except BaseException:
            self.param_groups.pop()
            raise
        gradients.install(self._engine)
        _hooks.extend(self._engine)
        self._rule.add_group(self.param_groups[-1])

    def state_dict(self) -> dict[str, Any]:
        """Exactly torch's format, with whole tensors: loads into the plain torch optimizer.

        ``{"state": {index: {...}}, "param_groups": [...]}``; ``state`` is empty before any step.
        Collective at stages 1 to 3: all ranks must call it, and all get the whole. (To hold it on
        rank 0 only: ``zero_torch.optimizer_state_dict``.)
        """
        return packing.pack_whole(self, keep=True)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the state dict of the plain torch optimizer, or of any rank count and stage.

        All ranks must have the same ``state_dict``; no communication. The dicts in ``param_groups``
        stay the same objects. Raises ValueError when groups, names or shapes don't agree; nothing
        is changed then.
        """
        unpacked = packing.unpack(self, state_dict)
        shapes = {i: tuple(self._live.parameter(i)[1].shape) for i in unpacked.states}
        packing.check(self, unpacked, shapes)
        self._live.make_trainable(sorted(unpacked.states))
        packing.load(self, unpacked, self._rule.load_states)

    def __getattr__(self, name: str) -> NoReturn:
        raise _habits.missing_in_optimizer(name)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a ZeroOptimizer can't be copied or pickled, because it belongs to this process and "
            "its ranks; save optimizer.state_dict() instead"
        )

    @property
    def _live(self) -> _C.Engine:
        assert self._engine is not None
        return self._engine

    def _scalar(self, value: float | torch.Tensor) -> torch.Tensor:
        if isinstance(value, torch.Tensor):
            return value.to(self._live.device, torch.float32)
        return torch.full((), value, dtype=torch.float32, device=self._live.device)

    def _check_parameters(self) -> None:
        if self._watch is not None:
            self._watch.check()


def _check_name(optimizer: str) -> None:
    if optimizer not in native.HYPERPARAMETERS:
        raise ValueError(
            'expected optimizer to be "adamw", "adam", "sgd", "lion" or a torch.optim class, '
            f'got "{optimizer}"'
        )


def _collect_wrapped(target: ZeroModule, stage: Any, given: dict[str, Any]) -> Collected:
    """The parameters of a ZeroModule, whose settings were made where it was made."""
    engine = target._engine
    if stage is not None and (isinstance(stage, bool) or stage != engine.options.stage):
        raise ValueError(f"the ZeroModule has stage={engine.options.stage}, got stage={stage!r}")
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is set where the ZeroModule is made, not in its optimizer")
    if _registry.optimizer_of(engine) is not None:
        gc.collect()  # one that was dropped may wait for it
        if _registry.optimizer_of(engine) is not None:
            raise ValueError("the ZeroModule has an optimizer already; drop that first")
    parameters = [engine.parameter(index) for index in range(engine.parameter_count())]
    return Collected(
        [{"params": [parameter for _, parameter, _ in parameters]}],
        [[name for name, _, _ in parameters]],
    )
