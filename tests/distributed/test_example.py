"""examples/train_gpt in both languages: the same losses, bit for bit, at every stage."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from example_runs import command, write_text

STEPS = 6
FLAGS = "--layers 2 --dim 48 --heads 4 --context 32 --batch 3 --bucket-mb 0.05 --warmup 2"
FLAGS += f" --steps {STEPS} --eval-every 3 --eval-batches 3 --sample-bytes 5"
STAGES = (0, 1, 2, 3)


class Example:
    """Runs the programs, each combination of arguments once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.text = folder / "text"
        self.logs: dict[tuple[str, str, int], Path] = {}
        write_text(self.text)

    def run(self, language: str, flags: str, ranks: int = 2) -> Path:
        """The folder of what a run wrote."""
        key = (language, flags, ranks)
        if key not in self.logs:
            out = self.folder / str(len(self.logs))
            arguments = [*FLAGS.split(), *flags.split(), "--text-dir", str(self.text)]
            arguments += ["--out", str(out), "--log-losses", str(self.folder / "losses")]
            done = subprocess.run(
                command(language, ranks) + arguments,
                env=os.environ | {"OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=100,
                check=False,
            )
            assert done.returncode == 0, done.stderr[-4000:]
            (self.folder / "losses").rename(out / "losses")
            (out / "output").write_text(done.stdout)
            self.logs[key] = out
        return self.logs[key]

    def losses(self, language: str, flags: str, ranks: int = 2) -> list[str]:
        return (self.run(language, flags, ranks) / "losses").read_text().splitlines()


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Example:
    return Example(tmp_path_factory.mktemp("example"))


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES)
def test_python_and_cpp_compute_the_same_losses(example: Example, stage: int) -> None:
    python = example.losses("python", f"--stage {stage}")
    assert len(python) == STEPS
    assert python == example.losses("c++", f"--stage {stage}")


@pytest.mark.slow
@pytest.mark.parametrize("stage", STAGES[1:])
def test_stages_compute_the_same_losses(example: Example, stage: int) -> None:
    assert example.losses("c++", f"--stage {stage}") == example.losses("c++", "--stage 0")


@pytest.mark.slow
@pytest.mark.parametrize("extra", ["", " --sync-every-micro"])
def test_accumulation_agrees_between_the_languages(example: Example, extra: str) -> None:
    flags = f"--stage 2 --accumulate 2{extra}"
    assert example.losses("python", flags) == example.losses("c++", flags)


@pytest.mark.slow
def test_one_rank_runs_without_a_launcher(example: Example) -> None:
    alone = example.losses("python", "--stage 2", ranks=0)
    assert alone == example.losses("c++", "--stage 2", ranks=0)
    assert alone == example.losses("c++", "--stage 2", ranks=1)


@pytest.mark.slow
def test_the_run_is_reported(example: Example) -> None:
    out = example.run("python", "--stage 2 --accumulate 2")
    printed = (out / "output").read_text()
    assert "12 sequences of 32 bytes = 3 per rank x 2 ranks x 2 accumulated" in printed
    assert printed.count("validation loss") == 3
    assert "tokens/s" in printed
    assert "\r" not in printed
    assert (out / "training.png").stat().st_size > 10_000

    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["losses"][-1] < metrics["losses"][0]
    assert [step for step, _ in metrics["validation"]] == [0, 3, 6]
    assert len(metrics["memory"]) == 2
    for rank in metrics["memory"]:
        assert rank["held"]["optimizer_state"] == pytest.approx(
            metrics["theory"]["optimizer_state"], rel=0.1
        )


@pytest.mark.slow
def test_both_languages_write_the_same_metrics(example: Example) -> None:
    flags = "--stage 2 --accumulate 2"
    python, cpp = (
        json.loads((example.run(language, flags) / "metrics.json").read_text())
        for language in ("python", "c++")
    )
    assert python.keys() == cpp.keys()
    for key in python.keys() - {"seconds", "tokens_per_second"}:
        assert python[key] == cpp[key], key
