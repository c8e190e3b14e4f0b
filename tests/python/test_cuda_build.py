"""The parts for CUDA as they were built: nothing here needs a GPU."""

import importlib
import re
import struct
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from zero_torch import _C, _build_info

ROOT = Path(__file__).resolve().parents[2]
LIBRARY = ROOT / "python" / "zero_torch" / "lib" / "libzero.so"
BUILT = _build_info.cuda_architectures is not None


def output(*command, env=None):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env)
    return result.returncode, " ".join((result.stdout + result.stderr).split())


def readelf(*options):
    return output("readelf", *options, LIBRARY)[1]


def device_code(library):
    """Numbers of architectures with machine code and with PTX, from the headers in .nv_fatbin."""
    sections = output("readelf", "-SW", library)[1]
    offset, size = re.search(r"\.nv_fatbin PROGBITS \w+ (\w+) (\w+)", sections).groups()
    with library.open("rb") as file:
        file.seek(int(offset, 16))
        data = file.read(int(size, 16))
    found = {1: set(), 2: set()}  # by kind: PTX, machine code
    for match in re.finditer(re.escape(struct.pack("<I", 0xBA55ED50)), data):
        _, header, length = struct.unpack_from("<HHQ", data, match.start() + 4)
        at = match.start() + header
        end = at + length
        while at < end:
            kind, _, header, length = struct.unpack_from("<HHIQ", data, at)
            (number,) = struct.unpack_from("<I", data, at + 28)
            found[kind].add(number)
            at += header + length
    return found[2], found[1]


def test_a_cpu_torch_has_no_parts_for_cuda_and_another_says_which():
    assert (_build_info.torch_cuda is None) == (torch.version.cuda is None)
    assert torch.version.cuda is not None or not BUILT
    assert (_build_info.nvcc is None) == (not BUILT)
    if BUILT:
        assert _build_info.nvcc.split(".")[0] == torch.version.cuda.split(".")[0]
    assert _C.has_nccl() == BUILT
    line = f"CUDA kernels and NCCL: {_build_info.cuda_architectures or 'none'}"
    assert line in output(sys.executable, "-m", "zero_torch", "--info")[1]


def test_the_library_has_device_code_for_every_architecture():
    assert (".nv_fatbin" in readelf("-SW")) == BUILT
    if BUILT:
        entries = _build_info.cuda_architectures.split()
        machine = {int(entry.removesuffix("-real")) for entry in entries if "-virtual" not in entry}
        ptx = {int(entry.removesuffix("-virtual")) for entry in entries if "-real" not in entry}
        assert device_code(LIBRARY) == (machine, ptx)


def test_the_library_takes_cuda_from_torch_and_exports_none_of_it():
    needed = set(re.findall(r"NEEDED\) Shared library: \[(.*?)\]", readelf("-d")))
    assert ("libtorch_cuda.so" in needed) == BUILT
    runtimes = {name for name in needed if name.startswith("libcudart")}
    assert len(runtimes) == (1 if BUILT else 0)
    assert not {name for name in needed if name.startswith(("libcuda.", "libnccl"))}
    exported = output("nm", "-DC", "--defined-only", LIBRARY)[1]
    assert "zero::comm::has_nccl()" in exported
    assert "cudaLaunchKernel" not in exported
    undefined = output("nm", "-DC", "--undefined-only", LIBRARY)[1]
    assert ("c10d::ProcessGroupNCCL::ProcessGroupNCCL" in undefined) == BUILT


# ---- configuring ----


def fake_torch(path, cuda):
    for name in ("lib", "include/torch/csrc/api/include"):
        (path / name).mkdir(parents=True)
    (path / "lib" / "libtorch.so").touch()
    version = "2.99.0+cu130" if cuda else "2.99.0+cpu"
    (path / "version.py").write_text(f"__version__ = '{version}'\ncuda = {cuda!r}\n")
    return path


def fake_nvcc(path, release):
    nvcc = path / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    lines = f"#$ TOP={path}", f"Cuda compilation tools, release {release}, V{release}.1"
    nvcc.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines))
    nvcc.chmod(0o755)
    return nvcc


def configure(build, torch_root, *options):
    cmake = Path(sys.executable).with_name("cmake")
    parts = ("PYTHON", "TESTS", "EXAMPLES")
    return output(
        cmake if cmake.exists() else "cmake",
        *("-S", ROOT, "-B", build, f"-DTORCH_ROOT={torch_root}"),
        *(f"-DZERO_BUILD_{part}=OFF" for part in parts),
        *options,
    )


def test_on_with_a_cpu_torch_is_an_error_that_says_what_to_do(tmp_path):
    root = fake_torch(tmp_path / "torch", None)
    status, said = configure(tmp_path / "build", root, "-DZERO_WITH_CUDA=ON")
    assert status != 0
    assert "expected a torch with CUDA, got torch 2.99.0+cpu" in said
    assert "ZERO_WITH_CUDA=OFF" in said


@pytest.mark.parametrize("asked", ["AUTO", "OFF"])
def test_a_cpu_torch_is_no_error_otherwise(tmp_path, asked):
    root = fake_torch(tmp_path / "torch", None)
    status, said = configure(tmp_path / "build", root, f"-DZERO_WITH_CUDA={asked}")
    assert status == 0, said
    assert ("Zero without CUDA: torch 2.99.0+cpu has none" in said) == (asked == "AUTO")


def test_a_compiler_of_another_version_is_named(tmp_path):
    root = fake_torch(tmp_path / "torch", "13.0")
    nvcc = fake_nvcc(tmp_path / "old", "11.8")
    options = root, f"-DCMAKE_CUDA_COMPILER={nvcc}"
    status, said = configure(tmp_path / "build", *options, "-DZERO_WITH_CUDA=ON")
    assert status != 0
    for part in ("nvcc of CUDA 13", f"{nvcc} is of CUDA 11.8", "nvidia-cuda-nvcc==13.0.*"):
        assert part in said
    status, said = configure(tmp_path / "build", *options, "-DZERO_WITH_CUDA=AUTO")
    assert status == 0, said
    assert "Zero without CUDA: expected an nvcc of CUDA 13" in said


def test_missing_parts_of_torch_are_named(tmp_path):
    root = fake_torch(tmp_path / "torch", "13.0")
    nvcc = fake_nvcc(tmp_path / "new", "13.0")
    status, said = configure(
        tmp_path / "build", root, "-DZERO_WITH_CUDA=ON", f"-DCMAKE_CUDA_COMPILER={nvcc}"
    )
    assert status != 0
    for part in ("nccl.h", "libtorch_cuda.so", "libcudart.so.13"):
        assert part in said


def test_another_value_of_the_option_is_an_error(tmp_path):
    root = fake_torch(tmp_path / "torch", None)
    status, said = configure(tmp_path / "build", root, "-DZERO_WITH_CUDA=MAYBE")
    assert status != 0
    assert "AUTO, ON or OFF, got MAYBE" in said


# ---- which backend ----


def on_ranks(body, size):
    """What `body(rank)` returns, by rank; ranks are threads."""
    results = [None] * size

    def run(rank):
        try:
            results[rank] = body(rank)
        except Exception as error:  # shown by the comparison
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.mark.parametrize(
    ("gpus", "obstacle"),
    [
        (["a", "b"], ""),
        (["", ""], "no rank has a GPU"),
        (["a", ""], "no GPU is there for rank 1"),
        (["a", "b", "a"], "ranks 0 and 2 are on the same GPU (a)"),
    ],
)
def test_every_rank_decides_alike(gpus, obstacle):
    store = dist.HashStore()
    size = len(gpus)
    said = on_ranks(lambda rank: _C.nccl_obstacle(store, rank, size, gpus[rank], 20.0), size)
    assert said == [obstacle] * size


@pytest.mark.parametrize("seen", [2, 1])
def test_ranks_that_share_a_gpu_are_told_why_nccl_is_not_used(monkeypatch, recwarn, seen):
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid=f"gpu-{index}")
    )
    module = importlib.import_module("zero_torch.init")
    store = dist.HashStore()

    def decide(rank):
        environment = SimpleNamespace(rank=rank, world_size=2, local_rank=rank)
        return module._can_use_nccl(store, environment, 20.0)

    assert on_ranks(decide, 2) == [seen == 2] * 2
    assert sorted(chosen) == ([0, 1] if seen == 2 else [0, 0])
    texts = [str(warning.message) for warning in recwarn]
    assert len(texts) == (0 if seen == 2 else 1)
    for text in texts:
        assert "ranks 0 and 1 are on the same GPU (gpu-0)" in text
        assert "LOCAL_RANK modulo" in text
