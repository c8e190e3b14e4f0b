"""What can't be materialized is refused by name, and what init_from fills."""

import subprocess
import sys

import pytest
import torch
from meta_models import (
    GPT,
    NoReset,
    Rotary,
    Scale,
    assert_same,
    deferred,
    materialized,
    on_meta,
    ones,
    seeded,
)
from torch import nn
from torch.distributed import checkpoint

from zero_torch.deferred import Materializer

# Refused


@pytest.mark.parametrize("build", [deferred, on_meta])
def test_a_module_without_reset_is_refused_by_name(build):
    model = build(lambda: nn.Sequential(nn.Linear(2, 2), NoReset()))
    with pytest.raises(ValueError, match=r"'1' \(NoReset\) has no reset_parameters.*'gain'"):
        Materializer(model).check()
    Materializer(model, init_fn=ones).check()
    assert materialized(model, init_fn=ones)[1].gain.tolist() == [1, 1, 1]


def test_a_buffer_that_nothing_fills_is_refused():
    model = on_meta(lambda: nn.Sequential(Rotary()))
    with pytest.raises(ValueError, match=r"'0' \(Rotary\).*'frequencies'.*deferred_init"):
        Materializer(model).check()
    assert deferred(Rotary).frequencies.tolist() == [0, 1, 2, 3]


def test_a_buffer_that_reset_leaves_is_refused():
    materializer = Materializer(on_meta(lambda: nn.Sequential(Scale(3))))
    materializer.check()
    with pytest.raises(ValueError, match=r"'count', 'positions', 'mask' untouched.*deferred_init"):
        materializer.finish()


def test_buffers_that_reset_replaces_are_right():
    class Module(Rotary):
        def reset_parameters(self):
            self.frequencies = torch.arange(4)

    assert materialized(on_meta(Module)).frequencies.tolist() == [0, 1, 2, 3]


def test_a_meta_attribute_is_refused():
    def make():
        module = nn.Linear(2, 2)
        module.table = torch.arange(3)
        return nn.Sequential(module)

    materializer = Materializer(on_meta(make))
    with pytest.raises(RuntimeError, match=r"got '0\.table'"):
        materializer.finish()
    materializer = Materializer(on_meta(make), init_from=make().state_dict())
    with pytest.raises(ValueError, match=r"attribute '0\.table' is a meta tensor"):
        materializer.check()


def test_a_lazy_parameter_is_refused():
    with pytest.raises(ValueError, match=r"'weight'.*UninitializedParameter"):
        Materializer(on_meta(nn.LazyLinear, 3)).check()


def test_an_unknown_name_is_refused():
    materializer = Materializer(deferred(nn.BatchNorm1d, 2))
    with pytest.raises(ValueError, match="got 'nope'"):
        materializer.materialize(["nope"])
    with pytest.raises(ValueError, match="got 'running_mean'"):
        materializer.order([["running_mean"]])


def test_a_write_into_a_complete_unit_is_refused():
    materializer = Materializer(deferred(nn.MultiheadAttention, 4, 2))
    materializer.materialize(["out_proj.weight", "out_proj.bias"])
    with pytest.raises(RuntimeError, match=r"MultiheadAttention.*got 'out_proj\.bias' written"):
        materializer.materialize(["in_proj_weight"])


# init_from


def test_a_state_dict_fills_everything_whatever_its_dtypes():
    built = seeded(GPT, 1)
    state = {
        name: t.double() if t.is_floating_point() else t for name, t in built.state_dict().items()
    }
    del state["embed.weight"]  # tied: under its other name
    assert_same(materialized(deferred(GPT), init_from=state), built)


def test_from_a_state_dict_only_the_units_modules_are_made():
    model = deferred(GPT, tie=False)
    materializer = Materializer(model, init_from=GPT(tie=False).state_dict())
    materializer.materialize(["head.weight"])
    assert not model.head.weight.is_meta
    assert model.embed.weight.is_meta


def test_names_and_shapes_of_a_state_dict_are_checked():
    state = GPT().state_dict()
    cases = [
        (
            "blocks.1.norm.bias",
            None,
            "expected values for parameter 'blocks.1.norm.bias', got none",
        ),
        ("norm.weight", torch.ones(9), r"'norm.weight' to have the shape \(8,\).*got \(9,\)"),
        ("norm.weight", torch.ones(8, device="meta"), "'norm.weight', got a meta tensor"),
    ]
    for name, value, message in cases:
        wrong = {**state, name: value} if value is not None else {**state}
        if value is None:
            del wrong[name]
        with pytest.raises(ValueError, match=message):
            Materializer(deferred(GPT), init_from=wrong).check()


def test_buffers_that_no_state_dict_holds():
    def make():
        return nn.Sequential(nn.Linear(2, 2), Rotary())

    state = make().state_dict()
    with pytest.raises(ValueError, match=r"buffer '1\.frequencies' .* not persistent"):
        Materializer(on_meta(make), init_from=state).check()
    assert_same(materialized(deferred(make), init_from=state)[1], make()[1])

    def init(module):
        if isinstance(module, Rotary):
            module.frequencies.copy_(torch.arange(4))

    model = materialized(on_meta(make), init_from=state, init_fn=init)
    assert model[1].frequencies.tolist() == [0, 1, 2, 3]
    assert torch.equal(model[0].weight, state["0.weight"])


def test_safetensors_files(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch")
    built = seeded(GPT, 1)
    state = {name: t.clone() for name, t in built.state_dict().items() if name != "head.weight"}
    names = list(state)
    paths = [tmp_path / "a.safetensors", tmp_path / "b.safetensors"]
    safetensors.save_file({n: state[n] for n in names[::2]}, paths[0])
    safetensors.save_file({n: state[n] for n in names[1::2]}, paths[1])
    for given in (tmp_path, str(tmp_path), paths, [str(p) for p in paths]):
        assert_same(materialized(deferred(GPT), init_from=given), built)
    with pytest.raises(ValueError, match="init_from: expected values for"):
        Materializer(deferred(GPT), init_from=paths[0]).check()
    with pytest.raises(ValueError, match="expected each name once"):
        Materializer(deferred(GPT), init_from=[paths[0], paths[0]]).check()
    with pytest.raises(FileNotFoundError, match=r"none at '.*nowhere'"):
        Materializer(deferred(GPT), init_from=tmp_path / "nowhere").check()
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"expected \*\.safetensors files"):
        Materializer(deferred(GPT), init_from=tmp_path / "empty").check()
    (tmp_path / "text").write_text("no tensors")
    with pytest.raises(ValueError, match="to be a safetensors file"):
        Materializer(deferred(GPT), init_from=tmp_path / "text").check()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_other_files(tmp_path):
    built = seeded(GPT, 1)
    torch.save(built.state_dict(), tmp_path / "saved.pt")
    checkpoint.save({"model": built.state_dict()}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    for given in (tmp_path / "saved.pt", str(tmp_path / "dcp")):
        assert_same(materialized(deferred(GPT), init_from=given), built)
    torch.save([1], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list\.pt"):
        Materializer(deferred(GPT), init_from=tmp_path / "list.pt").check()


def test_without_safetensors_the_remedy_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match="pip install safetensors"):
        Materializer(deferred(GPT), init_from=tmp_path).check()


def test_safetensors_is_imported_only_when_needed():
    code = "import sys, zero_torch; assert 'safetensors' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
