"""The package as a user installs it: pip into an environment with torch alone, import, link."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
CONSUMER = ROOT / "tests" / "consumer"
TORCH_ROOT = Path(torch.__file__).resolve().parent
TORCH_VERSION = importlib.metadata.version("torch")


def run(*command, fails=False, env=None, **options):
    """The output of a command, which has to succeed (or to fail)."""
    result = subprocess.run(
        [str(part) for part in command],
        env={**os.environ, "PYTHONWARNINGS": "ignore", **(env or {})},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        **options,
    )
    assert (result.returncode != 0) == fails, result.stdout
    return result.stdout


def tool(name):
    """pip's cmake before the system's."""
    beside = Path(sys.executable).with_name(name)
    return beside if beside.exists() else name


def requirements(name, found=None):
    """The distribution `name` and all that it requires, as far as installed here."""
    found = {} if found is None else found
    key = re.sub(r"[-_.]+", "-", name).lower()
    try:
        distribution = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return found
    if key not in found:
        found[key] = distribution
        for requirement in distribution.requires or []:
            if "extra ==" not in requirement:
                requirements(re.match(r"[\w.-]+", requirement)[0], found)
    return found


def make_environment(path, names):
    """A virtual environment with links to some of this one's packages, and nothing else."""
    venv.create(path, symlinks=True, with_pip=False)
    python = path / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    found = {}
    for name in names:
        requirements(name, found)
    for distribution in found.values():
        tops = {file.parts[0] for file in distribution.files or [] if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return python, site


def install(python, *options, **keywords):
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--no-deps"]
    return run(*pip, *options, ROOT, **keywords)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Python and site-packages of an environment with torch and the package."""
    python, site = make_environment(tmp_path_factory.mktemp("installed"), ["torch"])
    # The flags of the development build, so that a compiler cache serves both.
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    install(python, "--no-build-isolation", env={"PATH": path, "CMAKE_ARGS": "-DZERO_WERROR=ON"})
    return python, site


def configure(site, build, *arguments, **options):
    return run(
        tool("cmake"),
        *("-S", CONSUMER, "-B", build),
        f"-DCMAKE_CXX_COMPILER_LAUNCHER={shutil.which('ccache') or ''}",
        f"-DCMAKE_PREFIX_PATH={site / 'zero_torch/share/cmake'}",
        *arguments,
        **options,
    )


def build_and_run(build):
    run(tool("cmake"), "--build", build)
    return run(build / "consumer", env={"OMP_NUM_THREADS": "1"})


def toolkit_options(tmp_path):
    """What find_package(Torch) of a CUDA torch asks for: a toolkit, here links to an nvcc and to
    the wheels of torch."""
    wheels = TORCH_ROOT.parent / "nvidia" / f"cu{torch.version.cuda.split('.')[0]}"
    places = [shutil.which("nvcc"), "/usr/local/cuda/bin/nvcc", wheels / "bin/nvcc"]
    nvcc = next((place for place in places if place and Path(place).exists()), None)
    if nvcc is None:
        pytest.skip("torch asks for a CUDA toolkit, and no nvcc is here")
    (root,) = re.findall(r"#\$ TOP=(.*)", run(nvcc, "--dryrun", "-x", "cu", "/dev/null"))
    toolkit = tmp_path / "toolkit"
    for source in (Path(root), wheels):
        for name in ("bin", "include", "lib", "nvvm"):
            (toolkit / name).mkdir(parents=True, exist_ok=True)
            for file in (source / name).glob("*"):
                for link in {file.name, re.sub(r"\.so\..*", ".so", file.name)}:
                    if not (toolkit / name / link).exists():
                        (toolkit / name / link).symlink_to(file)
    (toolkit / "lib64").symlink_to("lib")
    return [
        f"-DCUDA_TOOLKIT_ROOT_DIR={toolkit}",
        f"-DCUDAToolkit_ROOT={toolkit}",
        f"-DCMAKE_CUDA_COMPILER={toolkit / 'bin/nvcc'}",
    ], {"TORCH_CUDA_ARCH_LIST": "8.0"}


slow = [pytest.mark.slow, pytest.mark.timeout(900)]


class TestInstalled:
    pytestmark = slow

    def test_package_carries_both_faces(self, installed):
        package = installed[1] / "zero_torch"
        for name in (
            "__init__.py",
            "py.typed",
            "_C.pyi",
            "_build_info.py",
            "lib/libzero.so",
            "include/zero/zero.h",
            "share/cmake/Zero/ZeroConfig.cmake",
        ):
            assert (package / name).is_file(), name
        assert len(list(package.glob("_C.*.so"))) == 1

    def test_requires_the_torch_it_was_built_with(self, installed):
        (metadata,) = installed[1].glob("zero_torch-*.dist-info/METADATA")
        major, minor = TORCH_VERSION.split(".")[:2]
        (line,) = re.findall(r"^Requires-Dist: torch.*$", metadata.read_text(), re.MULTILINE)
        bounds = set(line.removeprefix("Requires-Dist: torch").split(","))
        assert bounds == {f">={major}.{minor}", f"<{major}.{int(minor) + 1}"}

    def test_trains(self, installed):
        code = """
import torch, zero_torch as zero
zero.init()
torch.manual_seed(0)
model, x = torch.nn.Linear(3, 1), torch.ones(4, 3)
optimizer = zero.ZeroOptimizer(model, stage=2, lr=1e-2)
losses = []
for _ in range(3):
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step(); optimizer.zero_grad()
    losses.append(loss.item())
assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1], losses
"""
        run(installed[0], "-c", code)

    def test_one_openmp_runtime(self, installed):
        code = """
import zero_torch
print(*{line.split()[-1] for line in open("/proc/self/maps") if "gomp" in line})
"""
        runtimes = run(installed[0], "-c", code).split()
        assert len(runtimes) == 1
        assert "torch" in Path(runtimes[0]).parts

    def test_libraries_are_relocatable(self, installed):
        package = installed[1] / "zero_torch"
        (extension,) = package.glob("_C.*.so")
        for library in (package / "lib/libzero.so", extension):
            (paths,) = re.findall(r"R(?:UN)?PATH\).*\[(.*)\]", run("readelf", "-d", library))
            assert all(path.startswith("$ORIGIN") for path in paths.split(":")), paths
        for config in (package / "share/cmake/Zero").iterdir():
            assert str(TORCH_ROOT) not in config.read_text(), config.name

    def test_commands(self, installed):
        folder = Path(run(installed[0], "-m", "zero_torch", "--cmake-dir").strip())
        assert (folder / "Zero" / "ZeroConfig.cmake").is_file()
        info = run(installed[0], "-m", "zero_torch", "--info")
        assert f"torch: {torch.__version__}" in info
        run(installed[0], "-m", "zero_torch", fails=True)

    def test_consumer(self, installed, tmp_path):
        configure(installed[1], tmp_path)
        assert build_and_run(tmp_path).startswith("loss ")
        code = """
import subprocess, sys
import torch, zero_torch as zero
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 13), nn.Linear(13, 1)
    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))

def make(rule):
    model = Net()
    return model, zero.ZeroOptimizer(model, rule, stage=1, lr=1e-2)

def step(model, optimizer):
    model(torch.ones(4, 7)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()

def values(model, optimizer):
    states = optimizer.state_dict()["state"].values()
    return [*model.state_dict().values(), *(v for state in states for v in state.values())]

def there_and_back(directory, rule, *more):
    first = make(rule)
    step(*first), step(*first)
    zero.save(directory, *first, extra={"step": 2, "name": "x"})
    subprocess.run([sys.argv[1], directory, *more], check=True)
    loaded, stepped = make(rule), make(rule)
    assert zero.load(directory + "-loaded", *loaded) == {"step": 2, "name": "x"}
    assert all(map(torch.equal, values(*loaded), values(*first)))
    step(*first)
    assert zero.load(directory + "-stepped", *stepped) is None
    for a, b in zip(values(*stepped), values(*first), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert stepped[1].param_groups[0]["lr"] == 1e-2

there_and_back(sys.argv[2], "adamw")
there_and_back(sys.argv[2] + "-shards", torch.optim.AdamW, "torch")
there_and_back(sys.argv[2] + "-mixed", "adamw", "torch")
print("went on")
"""
        said = run(installed[0], "-c", code, tmp_path / "consumer", tmp_path / "saved")
        assert said.strip().endswith("went on")

    def test_consumer_that_found_torch_itself(self, installed, tmp_path):
        options, env = toolkit_options(tmp_path) if torch.version.cuda else ([], {})
        configure(
            installed[1],
            tmp_path / "build",
            "-DCONSUMER_FINDS_TORCH_FIRST=ON",
            f"-DTorch_DIR={TORCH_ROOT / 'share/cmake/Torch'}",
            *options,
            env=env,
        )
        assert build_and_run(tmp_path / "build").startswith("loss ")

    def test_consumer_with_another_torch(self, installed, tmp_path):
        other = tmp_path / "torch"
        (other / "lib").mkdir(parents=True)
        (other / "lib" / "libtorch.so").touch()
        (other / "version.py").write_text("__version__ = '9.9.1+cpu'\ncuda = None\n")
        said = configure(installed[1], tmp_path / "build", f"-DTORCH_ROOT={other}", fails=True)
        said = " ".join(said.split())
        assert f"is for torch {'.'.join(TORCH_VERSION.split('.')[:2])}.*, got 9.9.1+cpu" in said

    def test_import_with_another_torch(self, installed):
        info = installed[1] / "zero_torch" / "_build_info.py"
        built = info.read_text()
        code = """
import sys
try:
    import zero_torch
except ImportError as error:
    print(error, "zero_torch._C" in sys.modules)
"""
        try:
            info.write_text(re.sub(r'(torch_version.*= )".*"', r'\1"1.2.3"', built))
            said = run(installed[0], "-c", code)
        finally:
            info.write_text(built)
        assert "expected torch 1.2.*" in said
        assert f"got torch {torch.__version__}" in said
        assert "pip install --no-build-isolation" in said
        assert said.strip().endswith("False")

    def test_import_without_a_build(self, installed):
        info = installed[1] / "zero_torch" / "_build_info.py"
        hidden = info.rename(info.with_suffix(".hidden"))
        try:
            said = run(installed[0], "-B", "-c", "import zero_torch", fails=True)
        finally:
            hidden.rename(info)
        assert "has not been built" in said


def test_build_without_torch_says_what_to_type(tmp_path):
    python, _ = make_environment(tmp_path, ["setuptools"])
    said = run(python, ROOT / "setup.py", "-q", "egg_info", "-e", tmp_path, fails=True)
    assert len(said.splitlines()) == 1
    assert "pip install --no-build-isolation ." in said


def test_commands_of_the_source_tree():
    folder = Path(run(sys.executable, "-m", "zero_torch", "--cmake-dir").strip())
    assert (folder / "Zero" / "ZeroConfig.cmake").is_file()
