"""ZeroModule: a module that shards its own training, whoever steps it."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

from . import _C, _habits, comm_hooks
from ._engine import make_engine, prepare, watch
from ._parameters import collect
from ._watch import ModuleWatch
from .config import ZeroConfig, merged

T = TypeVar("T")
# Of nn.Module's own dicts, the wrapper uses those of the module that it wraps: the
# names of parameters, buffers and submodules are those of the plain model.
_SHARED = ("_parameters", "_buffers", "_non_persistent_buffers_set", "_modules")


class ZeroModule(nn.Module):
    """Wraps a module and shards its parameters' training in place.

    ``forward``, attributes, methods, ``len``, iteration and indexing pass through; setting an
    attribute sets it on the inner module; ``.module`` is the inner module. Names in ``state_dict``
    and ``named_parameters`` are those of the plain model. ``copy.deepcopy`` and pickling give a
    plain model.

    ``stage``, ``config``, ``process_group`` and the settings of ``ZeroConfig`` as keyword arguments
    are as in ``ZeroOptimizer``, which takes a ZeroModule as its target. The module owns the engine:
    dropping an optimizer leaves it sharded. ``zero_torch.unwrap`` gives the plain module back.

    At stage 3 parameters are sharded too: ``units`` says which submodules are gathered together
    (classes, names or a predicate ``(name, module) -> bool``; by default the repeated blocks of
    ``ModuleList`` and ``Sequential``, and the rest as the root), just before their forward and
    backward. No optimizer is needed for inference. Methods called through the wrapper
    (``generate``) gather what they read, as ``forward`` does. A module without storage (built on
    the meta device or under ``zero_torch.deferred_init()``) is materialized and initialized unit by
    unit: by ``init_fn(module)``, called for each submodule that has tensors of its own; or from
    ``init_from``, a state dict or paths of files that ``load`` reads; or by the modules' own
    ``reset_parameters``.

    Collective: all ranks construct it with equal arguments, and get rank 0's values of parameters
    and buffers. Raises as ``ZeroOptimizer`` does.
    """

    module: nn.Module
    _engine: _C.Engine
    _watch: ModuleWatch | None

    def __init__(
        self,
        module: nn.Module,
        *,
        stage: int,
        units: Any = None,
        config: ZeroConfig | None = None,
        process_group: Any = None,
        init_fn: Callable[[nn.Module], None] | None = None,
        init_from: Any = None,
        **settings: Any,
    ) -> None:
        super().__init__()
        if not isinstance(module, nn.Module):
            raise TypeError(f"expected module to be an nn.Module, got {type(module).__name__}")
        if isinstance(module, ZeroModule):
            raise ValueError("expected a plain module, got a ZeroModule, which is sharded already")
        if units is not None:
            settings["units"] = units
        merged_config = merged(config, settings)
        materializer = prepare(module, stage, init_fn, init_from)
        collected = collect(module, merged_config.ignored_params, deferred=materializer is not None)
        engine = make_engine(module, collected, merged_config, stage, process_group, materializer)
        own = self.__dict__
        own.update({name: getattr(module, name) for name in _SHARED})
        own["training"] = module.training
        own["_engine"] = engine
        own["_watch"] = watch(module, engine, collected)
        own["module"] = module
        self.register_load_state_dict_post_hook(_after_inner_load)  # type: ignore[no-untyped-call]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's, after a look whether its parameters are still the sharded ones."""
        if self._watch is not None:
            self._watch.check()
        return self.module(*args, **kwargs)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward accumulates without traffic; whole gradients are held meanwhile."""
        with no_sync(self._engine):
            yield

    def set_requires_gradient_sync(self, requires_gradient_sync: bool) -> None:
        """False: backward accumulates without traffic until it is set to True again."""
        self._engine.set_requires_gradient_sync(requires_gradient_sync)

    def register_comm_hook(self, hook: comm_hooks.CommHook) -> None:
        """As ``ZeroOptimizer.register_comm_hook``. Collective."""
        comm_hooks.register(self._engine, hook)

    def unshard(self) -> None:
        """Makes all parameters whole until ``reshard()`` or the next step. Collective at stage 3.

        Forwards and backwards in between gather nothing. At stages 0-2 parameters are whole: only
        waits for the last step's.
        """
        self._engine.unshard_all()

    def reshard(self) -> None:
        """Frees what ``unshard()`` made whole; nothing at stages 0-2."""
        self._engine.reshard_all()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's: ``.grad`` becomes None, or zeros of the parameter's shape. Not collective."""
        self.module.zero_grad(set_to_none)
        self._engine.zero_grad(set_to_none)

    # What nn.Module does to itself is done to the inner module.

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's: plain names, whole values. Not collective at stages 0-2."""
        return self.module.state_dict(*args, **kwargs)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The inner module's; with ``assign=True`` values are copied, so that parameters stay."""
        return self.module.load_state_dict(*args, **kwargs)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        # As a submodule: with the hooks of the inner module, and what it does to load itself.
        self.module._load_from_state_dict(*args, **kwargs)

    def train(self: T, mode: bool = True) -> T:
        assert isinstance(self, ZeroModule)
        self.module.train(mode)
        self.__dict__["training"] = mode
        return self

    def apply(self: T, fn: Any) -> T:
        assert isinstance(self, ZeroModule)
        self.module.apply(fn)
        return self

    def _apply(self: T, fn: Any, recurse: bool = True) -> T:
        assert isinstance(self, ZeroModule)
        self.module._apply(fn, recurse)
        return self

    def extra_repr(self) -> str:
        where = f"rank {self._engine.rank} of {self._engine.world_size}"
        return f"{type(self.module).__name__}, stage={self._engine.options.stage}, {where}"

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("module")
        if module is None:
            raise AttributeError(f"'{type(self).__name__}' object has no attribute '{name}'")
        # nn.Module's lookup would turn a property's own AttributeError into a missing name.
        found = getattr(type(module), name, None)
        if isinstance(found, property):
            return found.__get__(module, type(module))
        try:
            value = getattr(module, name)
        except AttributeError as error:
            raise _habits.missing_in_module(module, name, error) from None
        if self._engine.options.stage == 3 and inspect.ismethod(value):
            return _as_forward(self._engine, value)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if "module" not in self.__dict__ or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        else:
            setattr(self.module, name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.module, name)

    def __dir__(self) -> list[str]:
        return sorted({*object.__dir__(self), *dir(self.module)})

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(self.module)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Any]:
        return iter(self.module)  # type: ignore[call-overload, no-any-return]

    def __contains__(self, item: Any) -> bool:
        return item in self.module  # type: ignore[operator]

    def __getitem__(self, index: Any) -> Any:
        return self.module[index]  # type: ignore[index]

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _plain, (self.module,)


def _as_forward(engine: _C.Engine, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the inner module, such as ``generate``: what it reads is gathered."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        engine.enter_forward()
        try:
            return method(*args, **kwargs)
        finally:
            engine.leave_forward()

    return call


@contextlib.contextmanager
def no_sync(engine: _C.Engine) -> Iterator[None]:
    before = engine.requires_gradient_sync()
    engine.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        engine.set_requires_gradient_sync(before)


def _after_inner_load(module: nn.Module, incompatible_keys: Any) -> None:
    inner: nn.Module = module.__dict__["module"]
    for hook in inner._load_state_dict_post_hooks.values():
        hook(inner, incompatible_keys)


def _plain(module: nn.Module) -> nn.Module:
    return module
