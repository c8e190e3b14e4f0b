"""python -m zero_torch: consolidate and inspect."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_model import make_model, train

import zero_torch as zero
from zero_torch.__main__ import main


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model = make_model()
    opt = zero.ZeroOptimizer(model, stage=2, lr=1e-2)
    train(model, opt, 3)
    zero.save(tmp_path / "step-3", model, opt, extra={"step": 3, "best": 0.5})
    torch.save(zero.state_dict(model), tmp_path / "want.pt")
    return tmp_path / "step-3"


def test_consolidate(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = saved.parent / "model.safetensors"
    assert main(["consolidate", str(saved), str(file)]) == 0
    assert capsys.readouterr().out == f"{file}\n"
    want = torch.load(saved.parent / "want.pt")
    found = load_file(file)
    make_model(1).load_state_dict(found, strict=True)
    for name, value in want.items():
        assert torch.equal(found[name], value)
    sizes = ["--max-file-size", "100B", "--dtype", "bfloat16"]
    assert main(["consolidate", str(saved), str(file), *sizes]) == 0
    *parts, index = capsys.readouterr().out.split()
    assert index == f"{file}.index.json" and len(parts) > 1 and not file.exists()
    for part in parts:
        for name, value in load_file(part).items():
            assert torch.equal(value, want[name].bfloat16())


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--dtype", "int8"], "floating"),
        (["--dtype", "float"], None),
        (["--dtype", "nothing"], "expected a dtype"),
        (["--max-file-size", "5 parsecs"], "expected a size"),
        (["--max-file-size", "0"], "expected a size"),
        (["--max-file-size", "1KiB", "--no-verify", "--tied-once"], None),
    ],
)
def test_arguments(
    arguments: list[str],
    error: str | None,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = ["consolidate", str(saved), str(saved.parent / "model.safetensors"), *arguments]
    try:
        status = main(line)
    except SystemExit as exit_:
        status = exit_.code
    assert bool(status) == (error is not None)
    assert error is None or error in capsys.readouterr().err


def test_inspect_prints_what_there_is(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(saved)]) == 0
    out = capsys.readouterr().out
    for pattern in (
        r"^written by: zero \S+, torch \S+$",
        r"^world size: 1$",
        r"^stage: 2$",
        r"^optimizer: adamw$",
        r"^group 0: 5 parameters, lr 0.01, ",
        r"^steps: 3 \(5 parameters\)$",
        r"^extra: step, best$",
        r"^0\.weight +parameter +F32 +7x5 +140 +1$",
        r"^3\.bias:exp_avg_sq +state +F32 +3 +12 +1$",
        r"^parameter: 5 tensors, 75 elements, 300 bytes$",
        r"^state: 10 tensors, 150 elements, 600 bytes$",
        r"^verified: 15 pieces$",
    ):
        assert re.search(pattern, out, re.MULTILINE), f"{pattern} in\n{out}"


def test_inspect_names_what_is_damaged(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (parameters,) = saved.glob("parameters-*")
    (state,) = saved.glob("optimizer-*")
    changed = bytearray(parameters.read_bytes())
    changed[-1] ^= 1
    changed[-150] ^= 1
    parameters.write_bytes(changed)
    state.unlink()
    assert main(["inspect", str(saved), "--no-verify"]) == 0
    assert main(["inspect", str(saved)]) == 1
    out = capsys.readouterr().out
    assert re.search(rf"^{parameters.name}: .*'3\.bias\[0:3\]' is damaged", out, re.MULTILINE)
    assert len(re.findall("is damaged: its checksum", out)) == 2
    assert re.search(rf"^{state.name}: .*No such file", out, re.MULTILINE)
    assert "damaged: 3 problems" in out
    file = saved.parent / "model.safetensors"
    assert main(["consolidate", str(saved), str(file)]) == 1
    assert parameters.name in capsys.readouterr().err and not file.exists()
    (saved / "manifest.json").write_text("{}")
    assert main(["inspect", str(saved)]) == 1
    assert "manifest.json" in capsys.readouterr().err


def test_usage(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cmake-dir"]) == 0
    assert Path(capsys.readouterr().out.strip()).parts[-2:] == ("share", "cmake")
    assert main(["--info"]) == 0
    assert f"torch: {torch.__version__}" in capsys.readouterr().out
    for arguments in ([], ["--info", "inspect", str(saved)]):
        with pytest.raises(SystemExit) as raised:
            main(arguments)
        assert raised.value.code == 2 and "expected one of" in capsys.readouterr().err


ALONE = """
import sys
from zero_torch.__main__ import main
assert main(["inspect", sys.argv[1]]) == 0
assert main(["consolidate", sys.argv[1], sys.argv[2]]) == 0
import torch.distributed
assert not torch.distributed.is_initialized()
assert "torch.distributed.checkpoint" not in sys.modules
assert "torch._dynamo" not in sys.modules
"""


def test_in_a_process_of_their_own(saved: Path) -> None:
    file = saved.parent / "model.safetensors"
    command = [sys.executable, "-c", ALONE, str(saved), str(file)]
    subprocess.run(command, check=True, timeout=60)
    assert file.exists()
    command = [sys.executable, "-m", "zero_torch", "inspect", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stderr.startswith("error: [zero.checkpoint]")


def test_a_reader_that_has_seen_enough_is_no_error(saved: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "zero_torch", "inspect", str(saved)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.readline().startswith("written by: zero")
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(60) in (0, 1)
