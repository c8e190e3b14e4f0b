"""The same tests on another device: what `ranks.run` does to its ranks inside `on()`.

Tensors that a test makes are on the device then, and where it names no transport Zero gets that of
the device. "fake" is the device of tests/cpp/fake_device: host memory with streams and events, and
a checker that finds accesses and frees which they leave unordered.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.overrides import TorchFunctionMode

import zero_torch as zero

BUILD = Path(__file__).resolve().parents[2] / "build" / version("torch")


@dataclass(frozen=True)
class Device:
    kind: str  # "fake" or "cuda"
    transport: str  # where a test names none
    world: int | None = None  # instead of the test's


_current: Device | None = None


@contextlib.contextmanager
def on(device: Device) -> Iterator[None]:
    """Ranks that are started inside work on ``device``."""
    global _current
    _current = device
    try:
        yield
    finally:
        _current = None


def current() -> Device | None:
    return _current


def call(device: Device, function: Callable[..., Any], *arguments: Any) -> Any:
    """In a rank: what ``function`` gives on ``device``."""
    fake = load_fake() if device.kind == "fake" else None
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Sums in rank order: tests ask for equal bits.
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    torch.set_default_device(f"{device.kind}:{_index(device.kind)}")
    defaults = list(zero.ZeroConfig.__init__.__defaults__)
    fields = list(zero.ZeroConfig.__dataclass_fields__)
    defaults[fields.index("transport")] = device.transport
    with (
        mock.patch.object(zero.ZeroConfig.__init__, "__defaults__", tuple(defaults)),
        _SeededOnTheCPU(),
    ):
        result = function(*arguments)
    if fake is not None:
        fake.check()
    return result


def load_fake() -> Any:
    """The module zero_fake_device; from here on "fake:0" to "fake:3" are devices of torch."""
    if "zero_fake_device" in sys.modules:
        return sys.modules["zero_fake_device"]
    [path] = BUILD.glob("zero_fake_device.*.so")
    spec = importlib.util.spec_from_file_location("zero_fake_device", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["zero_fake_device"] = module
    torch.utils.rename_privateuse1_backend("fake")
    torch._register_device_module("fake", _device_module(module))
    return module


def _current_device(fake: Any) -> type:
    class CurrentDevice:
        """As ``torch.cuda.device``."""

        def __init__(self, device: Any) -> None:
            self._index = device if isinstance(device, int) else torch.device(device).index

        def __enter__(self) -> None:
            self._outer = fake.current_device()
            if self._index is not None and self._index >= 0:
                fake.set_device(self._index)

        def __exit__(self, *_: Any) -> None:
            fake.set_device(self._outer)

    return CurrentDevice


def _device_module(fake: Any) -> types.ModuleType:
    """What torch asks the Python module of a device for."""
    module = types.ModuleType("torch.fake")
    module.is_available = lambda: True
    module.is_initialized = lambda: True
    module.device = _current_device(fake)
    module.device_count = lambda: fake.device_count
    module.current_device = fake.current_device
    module.set_device = lambda device: fake.set_device(torch.device(device).index)
    module._is_in_bad_fork = lambda: False
    module.manual_seed_all = lambda seed: None
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    return module


def _index(kind: str) -> int:
    return torch.cuda.current_device() if kind == "cuda" else 0


class _SeededOnTheCPU(TorchFunctionMode):
    """Random tensors from a generator, which is the CPU's, have the CPU's values."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is None or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        if function not in (torch.randn, torch.rand, torch.randint, torch.randperm):
            return function(*args, **kwargs)
        requires_grad = kwargs.pop("requires_grad", False)
        made = function(*args, **kwargs, device="cpu").to(torch.get_default_device())
        return made.requires_grad_(requires_grad)
