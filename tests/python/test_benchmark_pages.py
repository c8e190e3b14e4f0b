"""Pages are made of what benchmarks wrote, and of nothing else."""

import argparse
import json
import re
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import machine
import page
import results
import run
from common import ROOT

QUIET = {"quiet": True, "worst": 0.0, "slower": 0.05, "before": {"load": 0.1}, "during": []}


@pytest.fixture
def folder(tmp_path):
    options = argparse.Namespace(results=tmp_path, quick=False, again=False, rounds=2)
    result = results.Result("steps", options)
    result.table("steps-small", "Steps", ["", "ms"], [["zero0", "1.5"], ["ddp", "2"]])
    result.write()
    return tmp_path


def test_a_page_gets_its_tables_and_keeps_the_rest(folder):
    text = (
        "before\n<!-- table: steps-small -->\nold\n<!-- end -->\n"
        "<!-- table: other -->\nkept\n<!-- end -->\nafter\n"
    )
    filled, missing = page.fill(text, page.documents(folder))
    assert "| zero0 | 1.5 |\n| ddp | 2 |\n<!-- end -->" in filled
    assert "old" not in filled and missing == ["other"]
    assert filled.startswith("before\n") and "kept\n<!-- end -->\nafter\n" in filled
    assert page.fill(filled, page.documents(folder))[0] == filled


def test_quick_runs_stay_out_of_the_docs(folder):
    text = "<!-- table: steps-small -->\nold\n<!-- end -->\n"
    found = page.documents(folder)
    found[0]["settings"]["quick"] = True
    assert page.fill(text, found) == (text, ["steps-small"])


def test_a_folder_gets_a_page_with_machine_and_tables(folder):
    text = page.write_page(folder).read_text()
    assert machine.describe()["processor"] in text and "| ddp | 2 |" in text


def test_finished_rounds_are_not_measured_again(tmp_path):
    options = argparse.Namespace(results=tmp_path, quick=True, again=False, rounds=3)
    measured = []

    def measure(index):
        if index == 2 and len(measured) == 2:
            raise KeyboardInterrupt
        measured.append(index)
        return {"value": index}

    with pytest.raises(KeyboardInterrupt):
        results.Result("steps", options).rounds(3, measure)
    measured.append("stopped")
    found = results.Result("steps", options).rounds(3, measure)
    assert measured == [0, 1, "stopped", 2]
    assert found == [{"value": 0}, {"value": 1}, {"value": 2}]


def test_rounds_of_other_settings_are_forgotten(tmp_path):
    options = argparse.Namespace(results=tmp_path, quick=True, again=False, rounds=1)
    results.Result("steps", options).rounds(1, lambda _: "few")
    options.rounds = 2
    assert results.Result("steps", options).rounds(2, lambda _: "many") == ["many", "many"]


def test_others_on_the_machine_are_told():
    busy = {"others": 0.0, "stolen": 0.2, "load": 0.1, "probe": 0.01}
    watch = machine.Watch(pause=0.01)
    watch.before, watch.laps = {**busy, "stolen": 0.0}, [busy, {**busy, "stolen": 0.0}]
    assert not watch.verdict()["quiet"]
    assert "NOT quiet" in machine.words_of(watch.verdict())
    watch.laps = [{**watch.before, "probe": 0.02}]
    assert not watch.verdict()["quiet"]
    assert "the same work took up to 100% longer" in machine.words_of(watch.verdict())
    watch.laps = [watch.before]
    assert watch.verdict()["quiet"]
    assert machine.words_of(QUIET).startswith("The machine was quiet: the same work took up to 5% ")


def test_spreads():
    assert results.spread([3.0, 1.0, 2.0], 1) == "2.0 (1.0-3.0)"
    assert results.spread([-3.0, 1.0, -2.0], 0) == "-2 (-3 to 1)"
    assert results.spread([0.5], 2) == "0.50" and results.spread([]) == "-"


def test_every_benchmark_that_is_named_is_there():
    for arguments, _ in run.BENCHMARKS.values():
        assert (ROOT / "benchmarks" / arguments[0]).is_file()
    listed = (ROOT / "docs" / "performance.md").read_text()
    for name in run.BENCHMARKS:
        assert f"`{name}`" in listed


def test_expected_counts_are_of_all_stages():
    document = json.loads((ROOT / "benchmarks" / "expected_instructions.json").read_text())
    for minor, counts in document["counts"].items():
        assert re.fullmatch(r"\d+\.\d+", minor)
        assert sorted(counts) == ["zero0", "zero1", "zero2", "zero3"]
