"""Models built without storage, and their materialization piece by piece.

    with zero.deferred_init():
        model = GPT(config)

Parameters are on the meta device then. ``Materializer`` gives them storage and initial values in
the order in which constructors would, so that a unit can be sharded before the next one exists.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import nn
from torch.utils.weak import WeakTensorKeyDictionary

from ._meta import Held, Written, attributes, constructed, held_tensors, is_plain, like, own
from ._tensor_files import PathLike, StoredTensors, open_stored

InitFn = Callable[[nn.Module], object]
InitFrom = Mapping[str, torch.Tensor] | PathLike | Sequence[PathLike]

_REMEDY = (
    "give it a reset_parameters() that fills them, or pass init_fn= (called with each module) or "
    "init_from= (a state dict or paths of files)"
)
_BUFFERS = "; a model built under zero_torch.deferred_init() keeps the values of its buffers"
# Where constructors made the parameters that they hold on the meta device.
_made_on = WeakTensorKeyDictionary()


@contextlib.contextmanager
def deferred_init() -> Iterator[None]:
    """Inside, modules that are constructed get their parameters on the meta device.

    Shapes, dtypes, ``requires_grad``, attributes and ties are kept, and the device: with
    ``torch.device("cuda")`` around it, parameters are made there later. Each has storage only until
    it is registered. Buffers are real, also those that Python code computes and no state dict
    holds, which plain ``torch.device("meta")`` loses.

    What a constructor writes into parameters is lost; values come later, from the modules'
    ``reset_parameters()``, ``init_fn`` or ``init_from``. Constructors that read the values of
    parameters fail, as they do on the meta device.

    Nests. It changes ``nn.Module`` for the whole process meanwhile: other threads must not
    construct modules.
    """
    previous = nn.Module.register_parameter
    replaced = WeakTensorKeyDictionary()  # a parameter may be registered in several places

    def register(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        previous(self, name, param)
        given = self._parameters[name]
        if given is not None and not given.is_meta and is_plain(given):
            if given not in replaced:
                replaced[given] = like(given, torch.device("meta"))
                _made_on[replaced[given]] = given.device
            self._parameters[name] = replaced[given]

    nn.Module.register_parameter = register  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = previous  # type: ignore[method-assign]


class Materializer:
    """Gives the meta tensors of a module storage on ``device`` and initial values.

    By default on the device that constructors used under ``deferred_init()``; of what was built on
    the meta device otherwise, on the one device of the module's other tensors, or on torch's
    default device.

    Real tensors are left as they are. Each module that holds meta tensors is initialized once,
    under no_grad, by the first of these that was given:

    - ``init_fn(module)``: initializes the module's own tensors, not those of its submodules. A
      module of which it writes nothing is left to ``reset_parameters()``.
    - ``init_from``: a mapping of names to tensors, a safetensors file, a list of such, a folder or
      an index of them, or another path that ``zero_torch.load`` reads. Values are converted to the
      parameter's dtype; files are read tensor by tensor. A tied parameter may be there under any of
      its names.
    - ``reset_parameters()``, or ``_reset_parameters()``.

    With both, ``init_fn`` runs first and may fill what ``init_from`` lacks.

    **Order.** Children before parents, siblings as registered: the order of constructors. After
    the same seed, values are bit for bit those of a model built on ``device`` whose constructors
    draw random numbers in ``reset_parameters()`` only; with ``init_fn``, those that
    ``model.apply(init_fn)`` leaves in what it writes. A tied parameter keeps the values of the
    first module that holds it (with ``init_fn`` the last, as in ``apply``).

    **Errors.** ``check()`` finds what can be found before anything is initialized; all ranks call
    it before they communicate. Whether an initialization fills every tensor shows only when it has
    run: ``materialize()`` and ``finish()`` raise ValueError then, on each rank that runs them.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        init_fn: InitFn | None = None,
        init_from: InitFrom | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.module = module
        self._init_fn = init_fn
        self._init_from = init_from
        self._opened: Mapping[str, torch.Tensor] | None = None
        self._device = device
        self._pending = [
            (name, part)
            for name, part in constructed(module)
            if any(tensor.is_meta for _, tensor in own(part))
        ]
        self._done: set[int] = set()
        self._taken: dict[str, nn.Parameter] = {}
        self._held = held_tensors(module, [part for _, part in self._pending])
        self._at = {(id(part), key): held for held in self._held for part, key in held.places}
        self._named = {n: held for held in self._held if held.is_parameter for n in held.names}
        real = {held.tensor.device for held in self._held if not held.tensor.is_meta}
        self._other = real.pop() if len(real) == 1 else torch.get_default_device()

    @property
    def needed(self) -> bool:
        """Whether any parameter or buffer is on the meta device."""
        return any(held.tensor.is_meta for held in self._held)

    @property
    def device(self) -> torch.device:
        """Of the first parameter that it makes."""
        made = (held for held in self._held if held.is_parameter and held.was_meta)
        first = next(made, None)
        return self._other if first is None else self._device_of(first)

    def _device_of(self, held: Held) -> torch.device:
        if self._device is not None:
            return self._device
        device: torch.device = _made_on.get(held.tensor, self._other)
        return device

    def check(self) -> None:
        """Raises ValueError for what can't be materialized, by name; changes nothing.

        Reads the headers of files: FileNotFoundError where there are none, ImportError where
        safetensors is needed and not installed.
        """
        for held in self._held:
            if held.tensor.is_meta and not is_plain(held.tensor):
                raise ValueError(
                    f"expected {held.described} on the meta device to be a plain tensor with a "
                    f"shape, got {type(held.tensor).__name__}; make it real first"
                )
        values = self._values()
        if values is not None:
            self._check_values(values)
        elif self._init_fn is None:
            for index in range(len(self._pending)):
                self._reset_of(index)
        if self._init_fn is None:
            for name, part in attributes(self.module):
                if values is None and _reset_method(part) is not None:
                    continue  # may well fill it; finish() looks
                raise ValueError(
                    f"attribute '{name}' is a meta tensor, but no parameter or buffer; build the "
                    "model under zero_torch.deferred_init(), or pass init_fn="
                )

    def order(self, units: Sequence[Collection[str]]) -> list[int]:
        """Indices of ``units``, each a collection of parameter names, by when they can be had.

        In this order, ``materialize()`` makes the least of what belongs to later units.
        """
        ends = [self._end_of(unit) for unit in units]
        return sorted(range(len(units)), key=ends.__getitem__)

    def materialize(self, names: Collection[str]) -> dict[str, nn.Parameter]:
        """The real parameters of these names, as in ``module.named_parameters()``.

        Initializes all modules up to the last one that holds any of them; from ``init_from`` alone,
        only those that do. Parameters of others that are made on the way wait in the model.

        Later on, the initialization of a module around it must not write a parameter that was
        returned here: RuntimeError, naming both.
        """
        wanted = set(names)
        indices: Sequence[int] = range(self._end_of(wanted))
        if self._init_fn is None and self._init_from is not None:
            indices = [
                index
                for index in indices
                if any(not wanted.isdisjoint(held.names) for _, held in self._own(index))
            ]
        self._initialize_all(indices)
        parameters = {name: self._named[name].parameter for name in names}
        self._taken.update(parameters)
        return parameters

    def finish(self) -> None:
        """Materializes what is left. RuntimeError when a meta tensor remains, naming it."""
        self._initialize_all(range(len(self._pending)))
        self._opened = None
        left = [held.names[0] for held in self._held if held.tensor.is_meta]
        left += [name for name, _ in attributes(self.module)]
        if left:
            raise RuntimeError(
                f"expected no meta tensor after materializing, got {_listed(left)}; assign real "
                "tensors in reset_parameters() or init_fn"
            )

    def _end_of(self, names: Collection[str]) -> int:
        for name in names:
            if name not in self._named:
                raise ValueError(
                    f"expected names of the module's parameters, got {name!r}; "
                    "see module.named_parameters()"
                )
        return 1 + max((self._named[name].last for name in names), default=-1)

    def _own(self, index: int) -> list[tuple[str, Held]]:
        part = self._pending[index][1]
        return [
            (key, self._at[id(part), key]) for key, _ in own(part) if (id(part), key) in self._at
        ]

    def _values(self) -> Mapping[str, torch.Tensor] | None:
        if self._opened is None and self._init_from is not None:
            given = self._init_from
            self._opened = given if isinstance(given, Mapping) else open_stored(given, "init_from")
        return self._opened

    def _check_values(self, values: Mapping[str, torch.Tensor]) -> None:
        for held in self._held:
            if not held.tensor.is_meta:
                continue
            name, expected = held.name_in(values), tuple(held.tensor.shape)
            if name is not None:
                in_file = isinstance(values, StoredTensors)
                found = (
                    values.shape(name) if isinstance(values, StoredTensors) else values[name].shape
                )
                if tuple(found) != expected:
                    raise ValueError(
                        f"init_from: expected '{name}' to have the shape {expected} of "
                        f"{held.described}, got {tuple(found)}; build the model as it was saved"
                    )
                if not in_file and values[name].is_meta:
                    raise ValueError(
                        f"init_from: expected values for {held.described}, got a meta tensor"
                    )
            elif self._init_fn is None and held.persistent:
                raise ValueError(
                    f"init_from: expected values for {held.described}, got none among its "
                    f"{len(values)} names; add them, or pass init_fn= too"
                )
            elif self._init_fn is None:
                raise ValueError(
                    f"{held.described} is on the meta device and not persistent, so that init_from "
                    "has no values for it; build the model under zero_torch.deferred_init(), or "
                    "pass init_fn= too"
                )

    def _reset_of(self, index: int) -> Callable[[], object]:
        name, part = self._pending[index]
        reset = _reset_method(part)
        if reset is None:
            fresh = [(key, held) for key, held in self._own(index) if held.was_meta]
            raise ValueError(
                f"module {_described(name, part)} has no reset_parameters() to initialize its meta "
                f"tensors {_listed(key for key, _ in fresh)}; {_REMEDY}"
                + ("" if all(held.is_parameter for _, held in fresh) else _BUFFERS)
            )
        return reset

    def _initialize_all(self, indices: Sequence[int]) -> None:
        for index in indices:
            if index not in self._done:
                self._done.add(index)
                with torch.no_grad():
                    self._initialize(index)

    def _initialize(self, index: int) -> None:
        values = self._values()
        fresh = [(key, held) for key, held in self._own(index) if held.tensor.is_meta]
        for _, held in fresh:
            held.allocate(self._device_of(held))
        if self._init_fn is not None or values is None:
            self._compute(index, [key for key, held in fresh if not held.name_in(values or ())])
        if values is not None:
            for _, held in self._own(index):
                name = held.name_in(values) if held.was_meta else None
                if name is not None:
                    held.tensor.copy_(values[name])

    def _compute(self, index: int, keys: list[str]) -> None:
        """Runs init_fn or reset_parameters(), which have to write the tensors ``keys``."""
        name, part = self._pending[index]
        described = _described(name, part)
        written = [Written.of(part, key) for key in keys]
        inside = {id(parameter) for parameter in part.parameters()}
        taken = [(n, p, p._version) for n, p in self._taken.items() if id(p) in inside]
        parameters = [(key, held) for key, held in self._own(index) if held.is_parameter]
        if self._init_fn is not None:
            init_fn = self._init_fn
            _run(
                lambda: init_fn(part), described, part, [k for k, h in parameters if not h.was_meta]
            )
        if self._init_fn is None or (keys and not any(written) and _reset_method(part)):
            _run(
                self._reset_of(index), described, part, [k for k, _ in parameters if k not in keys]
            )
        missed = [key for key, done in zip(keys, written, strict=True) if not done]
        if missed:
            how = "reset_parameters()" if self._init_fn is None else "init_fn"
            raise ValueError(
                f"expected {how} to fill the meta tensors of module {described}, got "
                f"{_listed(missed)} untouched; {_REMEDY}"
                + (_BUFFERS if any(key in part._buffers for key in missed) else "")
            )
        for other, parameter, version in taken:
            if parameter._version != version:
                raise RuntimeError(
                    f"expected the initialization of module {described} to write its own tensors, "
                    f"got '{other}' written, which belongs to a unit that is complete already; "
                    "write it in the reset_parameters() of the module that holds it, or make "
                    "both one unit"
                )


def _run(
    initialize: Callable[[], object], described: str, part: nn.Module, keep: list[str]
) -> None:
    """Runs it; the parameters ``keep`` have other memory meanwhile, and their values after."""
    parameters = [part._parameters[key] for key in keep]
    covered = [(parameter, parameter.data) for parameter in parameters if parameter is not None]
    for parameter, data in covered:
        parameter.data = torch.empty_like(data)
    try:
        initialize()
    except Exception as error:
        raise RuntimeError(f"initializing module {described} failed: {error}") from error
    finally:
        for parameter, data in covered:
            parameter.data = data


def _reset_method(module: nn.Module) -> Callable[[], object] | None:
    for name in ("reset_parameters", "_reset_parameters"):
        method = getattr(module, name, None)
        if callable(method):
            return method  # type: ignore[no-any-return]
    return None


def _described(name: str, module: nn.Module) -> str:
    kind = type(module).__name__
    return f"'{name}' ({kind})" if name else f"{kind}, the root"


def _listed(names: Iterator[str] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)
