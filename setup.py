"""Drives CMake: the metadata is in pyproject.toml, the build in CMakeLists.txt.

The package carries the C++ library too (lib/, include/, share/cmake/), so what is
built is installed by CMake with the package's folder as the prefix.

Environment: MAX_JOBS or CMAKE_BUILD_PARALLEL_LEVEL (compilers at once), CMAKE_ARGS
(further arguments of the configuration), ZERO_BUILD_DIR (default: below build/, by
torch's version, and kept, so that building again compiles what has changed).
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent


def find_torch() -> tuple[Path, str]:
    """The folder and the version of the torch that is built against."""
    spec = importlib.util.find_spec("torch")
    locations = spec.submodule_search_locations if spec else None
    try:
        if locations:
            return Path(locations[0]).resolve(), version("torch")
    except PackageNotFoundError:
        pass
    sys.exit(
        "zero-torch is built against the torch that it will run with, and this build cannot see "
        "one: install torch, then run: pip install --no-build-isolation ."
    )


def requirement(torch_version: str) -> str:
    """PyTorch keeps its C++ interface within a minor version only."""
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


def find_tool(name: str) -> str | None:
    """A program of this environment (pip's cmake and ninja), else one on PATH."""
    return shutil.which(name, path=os.path.dirname(sys.executable)) or shutil.which(name)


def jobs() -> str:
    """How many compilers run at once: one for each core and 2 GiB of memory."""
    for variable in ("MAX_JOBS", "CMAKE_BUILD_PARALLEL_LEVEL"):
        if os.environ.get(variable):
            return os.environ[variable]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return str(max(1, min(len(os.sched_getaffinity(0)), memory // 2**31)))


class CMakeBuild(build_ext):
    """Configures, builds, and installs into the package's folder.

    For `build_ext --inplace` and editable installs that is the one in the source tree.
    """

    def run(self) -> None:
        cmake = find_tool("cmake")
        if cmake is None:
            sys.exit("zero-torch needs CMake 3.18 or later: pip install cmake ninja")
        torch_root, torch_version = find_torch()
        name = torch_version if self.inplace else f"wheel-{torch_version}"
        build = Path(os.environ.get("ZERO_BUILD_DIR") or ROOT / "build" / name).resolve()
        package = Path(self.get_ext_fullpath("zero_torch._C")).resolve().parent

        self._run(cmake, "-S", ROOT, "-B", build, *self._configuration(torch_root))
        self._run(cmake, "--build", build, "--parallel", jobs())
        with tempfile.TemporaryDirectory(dir=build, prefix="stage-") as stage:
            self._run(cmake, "--install", build, "--prefix", stage, quiet=True)
            self._replace(Path(stage), package)

    def _configuration(self, torch_root: Path) -> list[str]:
        arguments = [
            f"-DTORCH_ROOT={torch_root}",
            f"-DPython3_EXECUTABLE={sys.executable}",
            "-DZERO_BUILD_PYTHON=ON",
        ]
        if not self.inplace:
            arguments += [
                "-DZERO_RELOCATABLE=ON",
                "-DZERO_WERROR=OFF",
                "-DZERO_BUILD_TESTS=OFF",
                "-DZERO_BUILD_EXAMPLES=OFF",
            ]
        ninja = find_tool("ninja")
        if ninja:
            arguments += ["-GNinja", f"-DCMAKE_MAKE_PROGRAM={ninja}"]
        return arguments + shlex.split(os.environ.get("CMAKE_ARGS", ""))

    @staticmethod
    def _run(*command: object, quiet: bool = False) -> None:
        try:
            subprocess.run(
                [str(part) for part in command],
                check=True,
                stdout=subprocess.DEVNULL if quiet else None,
            )
        except subprocess.CalledProcessError as error:
            sys.exit(f"zero-torch: {shlex.join(error.cmd)} failed")

    @staticmethod
    def _replace(stage: Path, package: Path) -> None:
        """Puts each file in place at once: a running process keeps the one it has mapped."""
        for source in sorted(path for path in stage.rglob("*") if path.is_file()):
            target = package / source.relative_to(stage)
            target.parent.mkdir(parents=True, exist_ok=True)
            unchanged = target.is_file() and target.read_bytes() == source.read_bytes()
            if not unchanged:
                temporary = target.with_name(f".{target.name}.new")
                shutil.copy2(source, temporary)
                temporary.replace(target)


setup(
    ext_modules=[Extension("zero_torch._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild},
    install_requires=[requirement(find_torch()[1])],
)
