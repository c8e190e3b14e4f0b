"""Which modules are gathered together; the rules themselves are tested in test_units.cpp."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_torch import _C, ZeroConfig
from zero_torch._parameters import collect
from zero_torch._units import find_units


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim))

    def forward(self, x):
        return x + self.mlp(x)


class Model(nn.Module):
    def __init__(self, layers=3, dim=4):
        super().__init__()
        self.embed = nn.Embedding(10, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, 10, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x):
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def find(model, units=None, min_unit_numel=0, **kwargs):
    config = ZeroConfig(units=units, min_unit_numel=min_unit_numel)
    return find_units(model, collect(model, **kwargs).named(), config)


def by_name(model, found):
    """Unit's name by parameter's name."""
    names = [name for name, _, _ in collect(model).named()]
    return {name: found.names[unit] for name, unit in zip(names, found.of_parameter, strict=True)}


def unit_modules(model, found):
    names = {id(module): name for name, module in model.named_modules()}
    return [(names[id(module)], unit) for module, unit in found.modules]


def test_repeated_blocks_are_units_by_default():
    model = Model()
    found = find(model)
    assert found.names == ["", "blocks.0", "blocks.1", "blocks.2"]
    assert unit_modules(model, found) == [
        ("", 0),
        ("blocks.0", 1),
        ("blocks.1", 2),
        ("blocks.2", 3),
    ]
    assert found.modules[0][0] is model
    assert found.of_parameter == [0] + [1] * 4 + [2] * 4 + [3] * 4  # the head is tied


def test_a_sequential_is_split_at_its_repeated_layers():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2), nn.ReLU(), nn.LayerNorm(2))
    found = find(model)
    assert unit_modules(model, found) == [("", 0), ("0", 1), ("2", 2)]
    assert found.of_parameter == [1, 1, 2, 2, 0, 0]


def test_a_repeated_list_is_a_unit_where_it_has_a_forward():
    model = nn.ModuleList([nn.ModuleList([Block(2), nn.Linear(2, 2)]) for _ in range(2)])
    assert find(model).names == ["", "0.0", "0.1", "1.0", "1.1"]
    model = nn.ModuleDict({name: nn.Sequential(Block(2), nn.Linear(2, 2)) for name in "ab"})
    assert find(model).names == ["", "a", "b"]


@pytest.mark.parametrize(
    ("units", "names"),
    [
        ([Block], ["", "blocks.0", "blocks.1", "blocks.2"]),
        ((Block, "embed"), ["", "embed", "blocks.0", "blocks.1", "blocks.2"]),
        (["blocks.1"], ["", "blocks.1"]),
        ([Model, ""], [""]),
        ([], [""]),
        ([nn.ReLU], None),
        (["blocks.2.mlp.2", "blocks.2"], ["", "blocks.2", "blocks.2.mlp.2"]),
        (lambda name, module: name.endswith("mlp"), ["", *(f"blocks.{i}.mlp" for i in range(3))]),
        (lambda name, module: isinstance(module, Model), [""]),
    ],
)
def test_units_are_chosen_by_class_name_or_predicate(units, names):
    if names is None:
        with pytest.raises(ValueError, match="ReLU"):
            find(Model(), units)
    else:
        assert find(Model(), units).names == names


def test_a_parameter_belongs_to_the_innermost_unit():
    model = Model()
    found = find(model, ["blocks.1", "blocks.1.mlp.0"])
    units = by_name(model, found)
    assert (
        units.pop("blocks.1.mlp.0.weight") == units.pop("blocks.1.mlp.0.bias") == "blocks.1.mlp.0"
    )
    assert units.pop("blocks.1.mlp.2.weight") == units.pop("blocks.1.mlp.2.bias") == "blocks.1"
    assert set(units.values()) == {""}


def test_a_tied_parameter_is_owned_where_it_comes_first():
    model = Model()
    assert by_name(model, find(model, ["embed", "head"]))["embed.weight"] == "embed"
    assert find(model, ["embed", "head"]).names == ["", "embed"]
    assert find(model, ["head"]).names == [""]
    model.blocks[2].mlp = model.blocks[0].mlp  # a shared module
    found = find(model)
    assert unit_modules(model, found) == [("", 0), ("blocks.0", 1), ("blocks.1", 2)]


def test_small_units_are_merged():
    model = Model()  # blocks of 40 elements
    found = find(model, min_unit_numel=41)
    assert found.names == ["", "blocks.0..blocks.2"]
    assert unit_modules(model, found) == [
        ("", 0),
        ("blocks.0", 1),
        ("blocks.1", 1),
        ("blocks.2", 1),
    ]
    assert find(Model(4), min_unit_numel=41).names == [
        "",
        "blocks.0..blocks.1",
        "blocks.2..blocks.3",
    ]
    found = find_units(model, collect(model).named(), ZeroConfig())
    assert found.names == [""] and found.modules == [(model, 0)]
    assert set(found.of_parameter) == {0}


def test_bare_parameters_are_one_unit():
    parameters = list(Model().parameters())
    for units in (None, [Block]):
        found = find_units(None, collect(parameters).named(), ZeroConfig(units=units))
        assert found.names == [""]
        assert found.of_parameter == [0] * len(parameters)
        assert found.modules == []


def test_ignored_parameters_have_no_unit():
    model = Model()
    ignored = [f"blocks.1.mlp.{i}.{kind}" for i in (0, 2) for kind in ("weight", "bias")]
    found = find(model, ignored_params=ignored)
    assert found.names == ["", "blocks.0", "blocks.2"]
    assert found.of_parameter == [0] + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("units", "message"),
    [
        (["block.1"], r"'block\.1'.*'embed', 'blocks', 'blocks\.0'"),
        ([nn.Conv2d], "Conv2d.*Block, Embedding"),
        ([nn.ModuleList], "'blocks' is a ModuleList.*children"),
        (["blocks"], "'blocks' is a ModuleList.*children"),
    ],
)
def test_units_that_are_none_are_refused(units, message):
    with pytest.raises(ValueError, match=message):
        find(Model(), units)


def test_a_bad_tree_is_refused():
    root = _C.ModuleSpec(name="", parent=-1, type="M")
    for modules, numels in [
        ([], []),
        ([root, _C.ModuleSpec(name="a", parent=1, type="M")], []),
        ([_C.ModuleSpec(name="", parent=-1, type="M", parameters=[1])], [1]),
        ([root], [-1]),
    ]:
        with pytest.raises(ValueError, match=r"\[zero\.layout\] expected"):
            _C.make_units(modules, numels, True, 0)


@st.composite
def trees(draw):
    """Modules, sizes of parameters, and whether units are made by default."""
    numels = draw(st.lists(st.integers(0, 50), max_size=12))
    held = st.lists(st.integers(0, len(numels) - 1), max_size=2) if numels else st.just([])
    modules = [
        {
            "name": f"m{index}" if index else "",
            "parent": draw(st.integers(0, index - 1)) if index else -1,
            "type": draw(st.sampled_from("ABC")),
            "list": draw(st.booleans()),
            "chosen": draw(st.booleans()),
            "parameters": draw(held),
            "called": draw(st.booleans()),
        }
        for index in range(draw(st.integers(1, 20)))
    ]
    return modules, numels, draw(st.booleans())


@given(trees(), st.sampled_from([0, 1, 20, 60, 10**6]))
def test_every_parameter_has_one_unit_and_every_unit_is_large_enough(tree, min_unit_numel):
    modules, numels, by_default = tree
    units = _C.make_units(
        [_C.ModuleSpec(**module) for module in modules], numels, by_default, min_unit_numel
    )
    assert units.names[0] == "" and units.unit_of_module[0] == 0
    for unit, name in enumerate(units.names[1:], 1):
        of_unit = [i for i, u in enumerate(units.unit_of_module) if u == unit]
        names = [modules[i]["name"] for i in (of_unit[0], of_unit[-1])]
        assert name == (names[0] if len(of_unit) == 1 else "..".join(names))
        sizes = [n for n, u in zip(numels, units.unit_of_parameter, strict=True) if u == unit]
        assert sizes and sum(sizes) >= min_unit_numel
        for i in of_unit:
            assert by_default or modules[i]["chosen"]
            assert not by_default or modules[i]["called"]
    firsts = [units.unit_of_module.index(unit) for unit in range(len(units.names))]
    assert firsts == sorted(firsts)
    assert len(units.unit_of_parameter) == len(numels)
