"""examples/train_gpt goes on where it was stopped: the same bits as a run that never was."""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import math
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from example_runs import (
    ROOT,
    Launch,
    command,
    steps_in,
    tensors_of,
    unfinished_saves,
    write_text,
)

STEPS = 60
MODEL = "--layers 2 --dim 48 --heads 4 --context 32 --batch 3 --bucket-mb 0.05 --sample-bytes 5"
FLAGS = f"{MODEL} --warmup 4 --steps {STEPS} --eval-every 7 --eval-batches 3 --save-every 4"


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    write_text(folder)
    return folder


class Runs:
    """Starts runs over one text, and ends what a test left."""

    def __init__(self, folder: Path, text: Path) -> None:
        self.folder, self.text = folder, text
        self.launches: list[Launch] = []

    def start(self, language: str, flags: str, out: Path) -> Launch:
        self.launches.append(Launch(language, 2, f"{flags} --text-dir {self.text}", out))
        return self.launches[-1]

    def stop(self) -> None:
        for launch in self.launches:
            launch.stop()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, text: Path) -> Iterator[Runs]:
    found = Runs(tmp_path_factory.mktemp("runs"), text)
    yield found
    found.stop()


@pytest.fixture(scope="module")
def never_stopped(runs: Runs) -> Path:
    out = runs.folder / "never-stopped"
    runs.start("python", f"{FLAGS} --stage 3 --no-plot", out).end()
    assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["step-56", "step-60"]
    return out


def assert_same(out: Path, other: Path) -> None:
    got, want = (json.loads((path / "metrics.json").read_text()) for path in (out, other))
    assert len(want["losses"]) == STEPS
    for key in ("losses", "validation"):
        assert got[key] == want[key], key
    last = Path("checkpoints", f"step-{STEPS}")
    weights, expected = tensors_of(out / last), tensors_of(other / last)
    assert weights.keys() == expected.keys()
    assert [name for name in expected if weights[name] != expected[name]] == []
    assert len(expected) == 3 * 28  # parameters and two moments each


def killed_while_training(runs: Runs, language: str, flags: str, out: Path) -> None:
    launch = runs.start(language, flags, out)
    at = steps_in(out) + random.randint(5, 15)
    launch.wait_for(lambda: steps_in(out) >= at)
    launch.kill_rank(random.randint(0, 1))


def killed_while_saving(runs: Runs, language: str, flags: str, out: Path) -> None:
    for _ in range(4):  # until the save was caught in its milliseconds
        before, at = unfinished_saves(out), steps_in(out)
        launch = runs.start(language, flags, out)
        launch.wait_for(lambda: steps_in(out) > at and unfinished_saves(out) - before != set())
        launch.kill_all()
        if unfinished_saves(out) - before:
            return
    pytest.fail("no save was interrupted")


@pytest.mark.slow
@pytest.mark.parametrize(
    "chain",
    [
        [("python", 0), ("python", 0), ("python", 0)],
        [("python", 3), ("c++", 3), ("python", 3)],
        [("c++", 3), ("c++", 0), ("c++", 3)],
    ],
    ids=["python-stage-0", "python-and-c++-stage-3", "c++"],
)
def test_killed_and_started_again(
    runs: Runs, never_stopped: Path, chain: list[tuple[str, int]]
) -> None:
    """A rank killed in a step, then all of them in a save, then on to the end."""
    out = runs.folder / "-".join(f"{language}{stage}" for language, stage in chain)
    moments: list[Callable[[Runs, str, str, Path], None]]
    moments = [killed_while_training, killed_while_saving]
    for moment, (language, stage) in itertools.zip_longest(moments, chain):
        flags = f"{FLAGS} --stage {stage}" + " --no-plot" * (language == "python")
        if moment is not None:
            moment(runs, language, flags, out)
        else:
            printed = runs.start(language, flags, out).end()
    step = int(re.search(r"resumed  \S+/step-(\d+)", printed)[1])
    assert 4 <= step < STEPS
    assert_same(out, never_stopped)
    kept = [path for path in (out / "checkpoints").iterdir() if (path / "manifest.json").exists()]
    assert sorted(path.name for path in kept) == ["step-56", "step-60"]


# ---- on one rank, within this process ----


@pytest.fixture
def train(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., str]:
    """Runs the Python example; what it printed."""
    monkeypatch.syspath_prepend(ROOT / "examples")
    for name in ("gpt", "text", "resume", "plot", "train_gpt"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    import train_gpt

    def run(flags: str, out: str = "run") -> str:
        where = f"--text-dir {text} --out {tmp_path / out}"
        monkeypatch.setattr(sys, "argv", ["train_gpt.py", *f"{MODEL} {where} {flags}".split()])
        with contextlib.suppress(SystemExit):
            train_gpt.main()
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def test_a_finished_run_says_so_and_goes_on_with_more_steps(
    train: Callable[..., str], tmp_path: Path
) -> None:
    train("--steps 6 --warmup 2 --save-every 4 --no-plot")
    before = (tmp_path / "run" / "metrics.json").read_bytes()
    said = train("--steps 6 --warmup 2 --no-plot")
    assert "finished" in said and "step-6: 6 steps were taken" in said and "--steps 12" in said
    assert (tmp_path / "run" / "metrics.json").read_bytes() == before
    assert "6 steps were taken, --steps is 4" in train("--steps 4 --warmup 2")
    said = train("--steps 9 --warmup 2 --no-plot")
    assert "resumed" in said and "the learning rate stays at 0.0002" in said
    # The learning rate goes on from where it was, as if the decay had been asked for.
    train("--steps 9 --decay-steps 6 --warmup 2 --no-plot", out="at-once")
    for name in ("losses", "validation"):
        got, want = (
            json.loads((tmp_path / out / "metrics.json").read_text())[name]
            for out in ("run", "at-once")
        )
        assert got == want, name
    last = Path("checkpoints", "step-9")
    assert tensors_of(tmp_path / "run" / last) == tensors_of(tmp_path / "at-once" / last)


def test_what_comes_after_the_last_step_is_made_up_for(
    train: Callable[..., str], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    train("--steps 4 --warmup 2")
    metrics = json.loads((out / "metrics.json").read_text())
    (out / "training.png").unlink()
    (out / "metrics.json").unlink()
    assert "resumed" in train("--steps 4 --warmup 2")
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert (out / "training.png").stat().st_size > 10_000


def test_another_run_is_refused_or_started_over(train: Callable[..., str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    train("--steps 4 --warmup 2 --no-plot")
    said = train("--steps 8 --warmup 2 --seed 2 --lr 0.1 --no-plot")
    assert "is of another run: --seed was 1, is 2; --lr was 0.002, is 0.1." in said
    assert "--out" in said and "--fresh" in said
    assert "--layers was 2, is 3" in train("--steps 8 --warmup 2 --layers 3")
    assert "--decay-steps was 4, is 7" in train("--steps 8 --warmup 2 --decay-steps 7")
    said = train("--steps 8 --warmup 2 --max-bytes 3000")
    assert re.search(r"the text was \d+ bytes of \S+ .*, is 3000 bytes of \S+ \(CRC-32 \d+\)", said)
    assert json.loads((out / "metrics.json").read_text())["losses"]
    train("--steps 3 --warmup 2 --seed 2 --no-plot --fresh")
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-3"]
    assert len(json.loads((out / "metrics.json").read_text())["losses"]) == 3
    # The same effective batch, spread in another way; another stage.
    said = train("--steps 5 --warmup 2 --seed 2 --batch 1 --accumulate 3 --stage 1 --no-plot")
    assert "note     stage 1 instead of 3" in said
    assert "note     another micro-batch: a step stays 3 sequences" in said
    (out / "history.jsonl").write_text("")
    with pytest.raises(RuntimeError, match=r"losses of 5 steps in .*, got 0; .*--fresh"):
        train("--steps 7 --warmup 2 --seed 2 --no-plot")


def test_one_run_at_a_time_writes(
    train: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    train("--steps 3 --warmup 2 --no-plot")
    monkeypatch.setattr("time.sleep", lambda _: None)
    with (tmp_path / "run" / "history.jsonl").open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        for flags in ("", " --fresh"):
            with pytest.raises(RuntimeError, match="another run writes to"):
                train("--steps 5 --warmup 2 --no-plot" + flags)
    assert (tmp_path / "run" / "checkpoints" / "step-3").is_dir()
    assert "resumed" in train("--steps 5 --warmup 2 --no-plot")


@pytest.mark.slow
@pytest.mark.parametrize("language", ["python", "c++"])
def test_other_ranks_go_on_and_it_is_said(
    runs: Runs, never_stopped: Path, train: Callable[..., str], tmp_path: Path, language: str
) -> None:
    """A checkpoint of two ranks on one: the effective batch is another."""
    shutil.copytree(never_stopped, tmp_path / "run")
    flags = FLAGS.replace(f"--steps {STEPS}", f"--steps {STEPS + 2}") + " --stage 1"
    if language == "python":
        said = train(f"{flags} --no-plot")
    else:
        arguments = f"{flags} --text-dir {runs.text} --out {tmp_path / 'run'}".split()
        said = subprocess.run(
            command(language, 0) + arguments, capture_output=True, text=True, check=True
        ).stdout
    assert "note     stage 1 instead of 3" in said
    assert "note     ranks 1 instead of 2: a step is 3 sequences instead of 6" in said
    found = (path / "metrics.json" for path in (tmp_path / "run", never_stopped))
    got, before = (json.loads(path.read_text()) for path in found)
    assert len(got["losses"]) == STEPS + 2 and got["losses"][:STEPS] == before["losses"]
    assert got["ranks"] == 1 and len(got["memory"]) == 1
    assert all(math.isfinite(loss) for loss in got["losses"])
