"""ZeroConfig mirrors C++ Options, and bad settings are refused at construction, by name."""

import dataclasses

import pytest
import torch
from torch import nn

import zero_torch as zero
from zero_torch import _C
from zero_torch.config import to_options


def test_names_are_those_of_cpp_options():
    cpp = {name for name in vars(_C.Options) if not name.startswith("_")} - {"validate", "stage"}
    assert {field.name for field in dataclasses.fields(zero.ZeroConfig)} == cpp


def test_defaults_are_those_of_cpp_options():
    ours, cpp = to_options(zero.ZeroConfig(), _C.Options().stage), _C.Options()
    for name in ["stage", *(field.name for field in dataclasses.fields(zero.ZeroConfig))]:
        assert getattr(ours, name) == getattr(cpp, name), name


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        zero.ZeroConfig().prefetch = 2


def test_native_defaults_are_torch_s():
    for ours, theirs in (
        (_C.AdamW(), torch.optim.AdamW),
        (_C.Adam(), torch.optim.Adam),
        (_C.SGD(), torch.optim.SGD),
    ):
        defaults = theirs([torch.zeros(1)]).defaults
        names = [name for name in vars(type(ours)) if not name.startswith("_")]
        assert {n: _plain(getattr(ours, n)) for n in names} == {n: defaults[n] for n in names}


def _plain(value):
    return tuple(value) if isinstance(value, list) else value


def make(**kw):
    return zero.ZeroOptimizer(nn.Linear(2, 2), **{"stage": 1, **kw})


@pytest.mark.parametrize(
    ("kw", "error", "words"),
    [
        ({"stage": -1}, ValueError, "stage 0, 1, 2 or 3, got -1"),
        ({"stage": 4}, ValueError, "stage 0, 1, 2 or 3, got 4"),
        ({"stage": "2"}, TypeError, "stage to be 0, 1, 2 or 3, got '2'"),
        ({"stage": True}, TypeError, "stage to be 0, 1, 2 or 3, got True"),
        ({"stage": None}, TypeError, "stage"),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes >= 1, got 0"),
        ({"bucket_bytes": -1}, ValueError, "bucket_bytes >= 1, got -1"),
        ({"bucket_bytes": 1.5}, TypeError, "bucket_bytes to be an int, got 1.5"),
        ({"bucket_bytes": 2**63}, ValueError, "bucket_bytes"),
        ({"first_bucket_bytes": 0}, ValueError, "first_bucket_bytes"),
        ({"prefetch": -1}, ValueError, "prefetch"),
        ({"min_unit_numel": -1}, ValueError, "min_unit_numel"),
        ({"max_live_numel": 0}, ValueError, "max_live_numel"),
        ({"reshard_after_forward": "yes"}, ValueError, "reshard_after_forward"),
        ({"units": 3}, TypeError, "units"),
        ({"units": [int]}, TypeError, "units"),
        ({"average": 1}, TypeError, "average to be True or False"),
        ({"transport": "tcp"}, ValueError, "transport"),
        ({"timeout": 0}, ValueError, "timeout"),
        ({"timeout": float("nan")}, ValueError, "timeout"),
        ({"timeout": "1"}, TypeError, "timeout"),
        ({"on_nonfinite": "panic"}, ValueError, "on_nonfinite"),
        ({"step_in_backward": 1}, TypeError, "step_in_backward"),
        ({"offload": True}, TypeError, "offload to be a str or None, got True"),
        ({"offload": "disk"}, ValueError, "offload to be unset, optimizer or parameters.*disk"),
        ({"offload": "parameters"}, ValueError, "stage 3 with offload=.parameters.*stage 1"),
        (
            {"offload": "optimizer"},
            ValueError,
            "parameters on a device.*offload=.optimizer.*'weight' on the CPU.*nothing to offload",
        ),
        (
            {"offload": "parameters", "stage": 3},
            ValueError,
            "parameters on a device with offload=.parameters.*'weight' on the CPU",
        ),
        ({"step_in_backward": True, "on_nonfinite": "skip"}, ValueError, "on_nonfinite"),
        (
            {"step_in_backward": True, "optimizer": torch.optim.SGD},
            ValueError,
            "SGD.*step_in_backward",
        ),
        ({"ignored_params": "weight"}, TypeError, "ignored_params"),
        ({"ignored_params": ["wait"]}, ValueError, "'wait'"),
        ({"ignored_params": [torch.zeros(1)]}, ValueError, "ignored_params"),
        ({"ignored_params": ["weight", "bias"]}, ValueError, "at least one parameter"),
        ({"param_dtype": "bfloat16"}, TypeError, "param_dtype"),
        ({"config": {"prefetch": 1}}, TypeError, "config"),
        ({"bucket_byte": 5}, TypeError, "'bucket_byte'.*bucket_bytes"),
        ({"momentum": 0.9}, TypeError, "'momentum'.*lr, betas, eps, weight_decay"),
        ({"process_group": 7}, TypeError, "process_group"),
        ({"shard_group": "inner"}, TypeError, "shard_group.*'inner'"),
        ({"replicate_group": 7}, TypeError, "replicate_group.*7"),
        ({"optimizer": "lamb"}, ValueError, "lamb"),
        ({"optimizer": 3}, TypeError, "optimizer"),
        ({"lr": -1.0}, ValueError, "lr"),
        ({"lr": "0.1"}, TypeError, "lr"),
        ({"lr": True}, TypeError, "lr"),
        ({"betas": (0.9, 1.0)}, ValueError, "betas"),
        ({"betas": 0.9}, TypeError, "betas"),
        ({"eps": -1e-8}, ValueError, "eps"),
        ({"weight_decay": -1}, ValueError, "weight_decay"),
        ({"optimizer": "sgd", "momentum": -1}, ValueError, "momentum"),
        ({"optimizer": "sgd", "nesterov": True}, ValueError, "nesterov"),
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, TypeError, "'betas'"),
    ],
)
def test_bad_settings_are_refused_by_name(kw, error, words):
    with pytest.raises(error, match=words):
        make(**kw)


@pytest.mark.parametrize(
    "kw",
    [
        {"foreach": True},
        {"fused": True},
        {"capturable": True},
        {"differentiable": True},
    ],
)
def test_what_is_not_built_is_refused_by_name(kw):
    with pytest.raises(NotImplementedError, match=next(iter(kw))):
        make(**kw)


def test_options_of_torch_are_accepted_at_their_defaults():
    make(amsgrad=False, maximize=False, foreach=None, capturable=False, differentiable=False)


def test_stage_3_settings_are_accepted():
    make(
        units=[nn.Linear, "block"],
        prefetch=2,
        reshard_after_forward="auto",
        min_unit_numel=5,
        max_live_numel=1,
    )
    make(units=lambda name, module: True, config=zero.ZeroConfig(units=["a"]))


@pytest.mark.parametrize("policy", ["ignore", "skip", "raise"])
def test_policies_for_nonfinite_gradients_are_accepted(policy):
    assert make(on_nonfinite=policy)._engine.options.on_nonfinite == policy


def test_keywords_go_over_the_config():
    optimizer = make(config=zero.ZeroConfig(bucket_bytes=100, average=False), bucket_bytes=200)
    assert optimizer._engine.options.bucket_bytes == 200
    assert not optimizer._engine.options.average


@pytest.mark.parametrize(
    ("target", "error", "words"),
    [
        ([], ValueError, "empty parameter list"),
        (nn.ReLU(), ValueError, "empty parameter list"),
        ([{"params": []}], ValueError, "empty parameter list"),
        (torch.zeros(2), TypeError, "target"),
        (5, TypeError, "target"),
        ([5], TypeError, "tensors"),
        ({nn.Parameter(torch.zeros(1))}, TypeError, "ordered"),
        ([{"params": {nn.Parameter(torch.zeros(1))}}], TypeError, "ordered"),
        ([{"parameters": []}], ValueError, "'params'"),
        ([torch.zeros(2, requires_grad=True) * 2], ValueError, "group 0 parameter 0.*leaf"),
        ([nn.Parameter(torch.zeros(2, dtype=torch.complex64))], TypeError, "complex64"),
        ([nn.Parameter(torch.zeros(2, device="meta"))], ValueError, "meta"),
        (nn.LazyLinear(3), ValueError, "'weight' is lazy"),
        (nn.LazyBatchNorm1d(), ValueError, "lazy"),
    ],
)
def test_bad_parameters_are_refused(target, error, words):
    with pytest.raises(error, match=words):
        zero.ZeroOptimizer(target, stage=1)


def test_a_parameter_given_twice_is_refused():
    parameter = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="twice"):
        zero.ZeroOptimizer([parameter, parameter], stage=1)
    with pytest.raises(ValueError, match=r"'group 1 parameter 0'.*'group 0 parameter 0'"):
        zero.ZeroOptimizer([{"params": [parameter]}, {"params": parameter}], stage=1)
    other = nn.Parameter(torch.zeros(2))
    with pytest.raises(ValueError, match="'a' for two"):
        zero.ZeroOptimizer([("a", parameter), ("a", other)], stage=1)


def test_parameters_that_share_memory_are_refused():
    storage = torch.zeros(6)
    first, second = nn.Parameter(storage[:4]), nn.Parameter(storage[3:])
    with pytest.raises(ValueError, match="share memory"):
        zero.ZeroOptimizer([("a", first), ("b", second)], stage=1)


def test_a_dtensor_is_refused():
    class DTensor(nn.Parameter):
        pass

    with pytest.raises(TypeError, match="'w' is a DTensor"):
        zero.ZeroOptimizer([("w", DTensor(torch.zeros(2)))], stage=1)


def test_a_managed_parameter_is_refused_while_its_optimizer_lives():
    model = nn.Linear(2, 2)
    optimizer = zero.ZeroOptimizer(model, stage=1)
    with pytest.raises(ValueError, match="'weight' is managed already"):
        zero.ZeroOptimizer(model, stage=1)
    del optimizer
    zero.ZeroOptimizer(model, stage=2)
