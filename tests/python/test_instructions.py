"""A training step costs no more instructions than it is known to."""

import json
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import callgrind
import instructions
from common import ROOT

# run_step calls work three times; work calls itself once, and malloc three times in all.
CALLGRIND = """\
# callgrind format
version: 1
desc: Trigger: Client Request: zero1
positions: line
events: Ir
summary: 155

ob=(1) program
fn=(1) (anonymous namespace)::run_step(int)
0 20
cfn=(2) work(int)
calls=3 0
0 135

fn=(2)
0 30
+4 10
cfn=(3) work(int)'2
calls=1 0
* 55
cfn=(4) malloc
calls=2 0
0 40

fn=(3)
0 35
cfn=(4)
calls=1 0
-1 20

fn=(4)
0 60
"""


def test_profiles_are_read(tmp_path):
    (tmp_path / "out.1").write_text(CALLGRIND)
    profile = callgrind.read_all(tmp_path / "out")["zero1"]
    assert profile.total == sum(profile.own.values()) == 155
    name = "(anonymous namespace)::run_step(int)"
    assert profile.own == {name: 20, "work(int)": 75, "malloc": 60}
    assert profile.inclusive == {name: 155, "work(int)": 135, "malloc": 60}
    assert profile.calls == {"work(int)": 3, "malloc": 3}
    assert instructions.phase_cost(profile, "run_step") == 155


@pytest.mark.parametrize(("found", "words"), [(103.0, []), (104.0, ["zero3"]), (50.0, [])])
def test_only_what_costs_more_than_the_tolerance_is_named(tmp_path, found, words):
    expected = tmp_path / "expected.json"
    counts = {instructions.torch_minor(): {"zero3": {"instructions": 100.0}}}
    expected.write_text(json.dumps({"tolerance": 0.03, "counts": counts}))
    dearer = instructions.check({"zero3": {"instructions": found}}, expected)
    assert [line.split(":")[0] for line in dearer] == words


def test_a_torch_without_counts_is_no_success(tmp_path):
    expected = tmp_path / "expected.json"
    expected.write_text(json.dumps({"tolerance": 0.03, "counts": {}}))
    assert "run with --update" in instructions.check({}, expected)[0]


@pytest.mark.slow
@pytest.mark.timeout(600)  # half a minute where nothing else runs
def test_no_step_costs_more_than_expected():
    """64 layers at stages 0 to 3 on one rank: instructions and allocations a layer and step."""
    program = ROOT / "build" / version("torch") / "step_instructions"
    assert program.is_file(), "apt-get install valgrind, then make build"
    counts = instructions.counts_of(instructions.measure(program, instructions.VARIANTS))
    assert instructions.check(counts) == []
