"""Models built without storage have the values of a CPU build once they are materialized."""

import copy

import pytest
import torch
from meta_models import GPT, assert_same, deferred, materialized, names_of, on_meta, ones, seeded
from torch import nn

import zero_torch as zero
from zero_torch.deferred import Materializer

# deferred_init()


def test_deferred_parameters_are_meta_and_buffers_real():
    model, built = deferred(GPT), GPT()
    assert {name: p.shape for name, p in model.named_parameters()} == {
        name: p.shape for name, p in built.named_parameters()
    }
    assert all(p.is_meta and type(p) is nn.Parameter for p in model.parameters())
    for (name, ours), (_, theirs) in zip(model.named_buffers(), built.named_buffers(), strict=True):
        assert torch.equal(ours, theirs), name
    assert model.head.weight is model.embed.weight
    assert not model.blocks[0].scale.shift.requires_grad
    assert model.state_dict().keys() == built.state_dict().keys()


def test_deferred_init_draws_no_random_numbers():
    before = torch.get_rng_state()
    deferred(nn.Linear, 4, 4)
    assert torch.equal(before, torch.get_rng_state())


def test_deferred_init_nests_and_restores():
    original = nn.Module.register_parameter
    with zero.deferred_init():
        with zero.deferred_init():
            assert nn.Linear(2, 2).weight.is_meta
        assert nn.Linear(2, 2).weight.is_meta
    with pytest.raises(KeyError), zero.deferred_init():
        raise KeyError
    assert nn.Module.register_parameter is original
    assert not nn.Linear(2, 2).weight.is_meta


def test_one_parameter_registered_twice_stays_one():
    def make():
        module = nn.Module()
        shared = nn.Parameter(torch.zeros(3, dtype=torch.float16), requires_grad=False)
        shared.tag = "mine"
        module.first = shared
        module.second = shared
        module.third = None
        module.register_parameter("fourth", None)
        return module

    module = deferred(make)
    assert module.first is module.second
    assert module.first.is_meta and module.first.dtype == torch.float16
    assert module.first.tag == "mine" and not module.first.requires_grad
    assert names_of(module) == ["first"]


def test_lazy_parameters_stay_lazy():
    model = deferred(nn.LazyLinear, 3)
    assert isinstance(model.weight, nn.UninitializedParameter)
    with zero.deferred_init():
        model(torch.ones(1, 2))
    assert model.weight.shape == (3, 2)


# Values


@pytest.mark.parametrize("build", [deferred, on_meta])
def test_values_are_those_of_a_cpu_build(build):
    def make():
        return nn.Sequential(
            nn.Embedding(7, 4, padding_idx=0),
            nn.MultiheadAttention(4, 2),
            nn.MultiheadAttention(4, 2, kdim=3, vdim=5, add_bias_kv=True),
            nn.LayerNorm(4),
            nn.Sequential(nn.Conv2d(4, 8, 3), nn.BatchNorm2d(8), nn.PReLU()),
            nn.LSTM(4, 3, num_layers=2),
            nn.Bilinear(2, 3, 4),
        )

    assert_same(materialized(build(make)), seeded(make))


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_a_gpt_s_values_are_those_of_a_cpu_build(tie, bias):
    model = materialized(deferred(GPT, tie=tie, bias=bias))
    built = seeded(lambda: GPT(tie=tie, bias=bias))
    assert_same(model, built)
    assert (model.head.weight is model.embed.weight) == tie
    tokens = torch.arange(10).view(2, 5)
    assert torch.equal(model(tokens), built(tokens))


def test_unit_by_unit_gives_the_same_values_and_waits_with_the_rest():
    model = deferred(GPT, tie=False)
    units = [[n for n in names_of(model) if n.startswith(f"blocks.{i}.")] for i in (2, 0, 1)]
    rest = [n for n in names_of(model) if not n.startswith("blocks.")]
    units.append([*rest])
    materializer = Materializer(model)
    assert materializer.needed
    materializer.check()
    assert materializer.order(units) == [1, 2, 0, 3]
    torch.manual_seed(5)
    for position, index in enumerate(materializer.order(units)):
        got = materializer.materialize(units[index])
        assert list(got) == units[index]
        assert all(p is model.get_parameter(name) and not p.is_meta for name, p in got.items())
        assert model.head.weight.is_meta == (position < 3)
        assert model.embed.weight.is_meta is False  # on the way
    materializer.finish()
    assert_same(model, seeded(lambda: GPT(tie=False)))


def test_a_tied_parameter_is_had_when_its_last_module_is_initialized():
    model = deferred(GPT)
    embed, block = ["embed.weight"], names_of(model.blocks[2])
    materializer = Materializer(model)
    assert materializer.order([embed, [f"blocks.2.{n}" for n in block]]) == [1, 0]
    assert materializer.order([[], ["head.weight"]]) == [0, 1]
    assert materializer.materialize(["head.weight"])["head.weight"] is model.embed.weight


def test_lstm_still_computes_with_its_parameters():
    model, built = materialized(deferred(nn.LSTM, 4, 3)), seeded(lambda: nn.LSTM(4, 3))
    x = torch.randn(2, 1, 4)
    assert torch.equal(model(x)[0], built(x)[0])
    model(x)[0].sum().backward()
    assert model.weight_ih_l0.grad is not None


def test_modules_are_initialized_once():
    counts = {}

    class Counted(nn.Linear):
        def reset_parameters(self):
            counts[id(self)] = counts.get(id(self), 0) + 1
            super().reset_parameters()

    def make():
        shared = Counted(2, 2)
        return nn.Sequential(nn.Sequential(Counted(2, 2), shared), shared, Counted(2, 2))

    model = deferred(make)
    counts.clear()
    materializer = Materializer(model)
    for unit in (["1.weight"], ["0.0.weight", "0.0.bias"], ["2.weight"], ["2.weight"]):
        materializer.materialize(unit)
    materializer.finish()
    assert sorted(counts.values()) == [1, 1, 1]


def test_attributes_layout_and_class_are_kept():
    class Tagged(nn.Parameter):
        pass

    module = on_meta(nn.Module)
    with torch.device("meta"):
        module.weight = Tagged(torch.empty(4, 3).t(), requires_grad=False)
    module.weight.tag = 1
    module.reset_parameters = lambda: module.weight.fill_(2.0)
    weight = Materializer(module).materialize(["weight"])["weight"]
    assert type(weight) is Tagged and weight.tag == 1 and not weight.requires_grad
    assert weight.stride() == (1, 3) and weight.device.type == "cpu"
    assert bool((weight == 2).all())


def test_real_parameters_are_left():
    model = nn.Sequential(nn.Linear(2, 2), deferred(nn.Linear, 2, 2))
    real = model[0].weight
    model[1].bias = nn.Parameter(torch.tensor([7.0, 8.0]))
    before = copy.deepcopy(real.data)
    for settings in ({}, {"init_fn": ones}):
        part = copy.deepcopy(model)
        materialized(part, **settings)
        assert torch.equal(part[0].weight, before)
        assert part[1].bias.tolist() == [7, 8]
    assert not Materializer(nn.Linear(2, 2)).needed


# init_fn


def gpt_init(module):
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0, 0.02)
        if getattr(module, "bias", None) is not None:
            nn.init.zeros_(module.bias)


def test_init_fn_gives_what_apply_gives():
    def make():
        model = nn.Sequential(
            nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.Linear(4, 7, bias=False)
        )
        model[3].weight = model[0].weight
        return model

    built = make()
    torch.manual_seed(5)
    built.apply(gpt_init)
    assert_same(materialized(deferred(make), init_fn=gpt_init), built)


def test_what_init_fn_leaves_in_part_is_refused():
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    materializer = Materializer(deferred(nn.Sequential, nn.ReLU()), init_fn=init)
    assert not materializer.needed
    model = deferred(lambda: nn.Sequential(nn.Linear(2, 2)))
    materializer = Materializer(model, init_fn=init)
    materializer.check()
    with pytest.raises(ValueError, match=r"init_fn.*'0' \(Linear\).*'bias' untouched"):
        materializer.materialize(["0.weight"])


def test_an_error_of_an_initialization_names_the_module():
    def init(module):
        raise KeyError("no such thing")

    materializer = Materializer(deferred(nn.Linear, 2, 2), init_fn=init)
    with pytest.raises(RuntimeError, match="module Linear, the root failed: 'no such thing'"):
        materializer.finish()
