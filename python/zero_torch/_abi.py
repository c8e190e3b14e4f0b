"""Whether the extension fits the torch that is installed, asked before it is loaded.

PyTorch promises no C++ interface across minor versions: an extension for another one
fails to load with an undefined symbol, or worse, loads.
"""

from __future__ import annotations

import torch

REMEDY = "pip install --no-build-isolation --force-reinstall --no-deps"


def minor(version: str) -> str:
    """'2.13' of '2.13.0+cpu'."""
    return ".".join(version.split(".")[:2])


def check() -> None:
    """Raises ImportError when there is no extension, or one for another torch."""
    try:
        from . import _build_info
    except ImportError as error:
        raise ImportError(
            "[zero] expected the extension zero_torch._C beside the Python files, got none: it "
            "has not been built; run `make build`, or `pip install --no-build-isolation .` in "
            "the source tree"
        ) from error
    built, installed = _build_info.torch_version, str(torch.__version__)
    if minor(built) != minor(installed):
        raise ImportError(
            f"[zero] expected torch {minor(built)}.*, for which zero_torch "
            f"{_build_info.zero_version} was built (with {built}), got torch {installed}; build "
            f"zero_torch again with `{REMEDY} zero-torch` (or in the source tree with `make "
            f'build`), or run `pip install "torch=={minor(built)}.*"`'
        )


def info() -> dict[str, str | None]:
    """What a bug report needs to know."""
    import platform

    from . import _build_info

    return {
        "zero_torch": _build_info.zero_version,
        "torch": str(torch.__version__),
        "built with torch": _build_info.torch_version,
        "built with CUDA": _build_info.torch_cuda,
        "CUDA kernels and NCCL": _build_info.cuda_architectures,
        "nvcc": _build_info.nvcc,
        "compiler": _build_info.compiler,
        "build type": _build_info.build_type,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
