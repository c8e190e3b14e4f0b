"""State dicts: torch's format, both ways; and what gathered, full_* and load_state_dict do."""

import copy
import io

import pytest
import torch
from small_model import assert_equal, loss_of, make_model, stages, train
from torch import nn

import zero_torch as zero

RULES = [
    ("adamw", torch.optim.AdamW, {}),
    ("adam", torch.optim.Adam, {}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9}),
    ("sgd", torch.optim.SGD, {}),
    ("adamw", torch.optim.AdamW, {"amsgrad": True}),
    ("adam", torch.optim.Adam, {"amsgrad": True, "maximize": True}),
]


@stages
@pytest.mark.parametrize(("name", "cls", "kw"), RULES)
def test_round_trip_with_plain_torch(name, cls, kw, stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, name, stage=stage, lr=1e-2, **kw)
    assert optimizer.state_dict()["state"] == {}
    train(ours, optimizer, 3)
    saved = optimizer.state_dict()

    theirs.load_state_dict(ours.state_dict())
    reference = cls(theirs.parameters(), lr=1.0)
    reference.load_state_dict(copy.deepcopy(saved))
    again = reference.state_dict()
    assert again["param_groups"] == saved["param_groups"]
    assert {k: set(v) for k, v in again["state"].items()} == {
        k: set(v) for k, v in saved["state"].items()
    }
    for index, p in enumerate(ours.parameters()):
        for key, value in saved["state"].get(index, {}).items():
            assert value.shape == (() if key == "step" else p.shape)
            assert value.dtype == torch.float32

    fresh = make_model()
    fresh.load_state_dict(ours.state_dict())
    loaded = zero.ZeroOptimizer(fresh, name, stage=(stage + 1) % 3, lr=1.0, **kw)
    loaded.load_state_dict(copy.deepcopy(again))
    for model, stepper in ((ours, optimizer), (theirs, reference), (fresh, loaded)):
        train(model, stepper, 2, first=3)
        assert_equal(model, ours)


@pytest.mark.parametrize("kw", [{"foreach": True}, {"fused": True}])
def test_state_of_torch_s_other_implementations_loads(kw):
    ours, theirs = make_model(), make_model()
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2, **kw)
    train(theirs, reference, 3)
    ours.load_state_dict(theirs.state_dict())
    optimizer = zero.ZeroOptimizer(ours, stage=1)
    optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
    train(ours, optimizer, 2, first=3)
    train(theirs, reference, 2, first=3)
    assert_equal(ours, theirs)


def test_step_count_survives():
    p = nn.Parameter(torch.ones(1))
    optimizer = zero.ZeroOptimizer([p], "adam", stage=1, lr=0.1)

    def step(opt, gradient):
        opt.zero_grad()
        (p * gradient).sum().backward()
        opt.step()

    for gradient in (1.0, -2.0, 3.0):
        step(optimizer, gradient)
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    del optimizer
    resumed = zero.ZeroOptimizer([p], "adam", stage=2, lr=0.1)
    resumed.load_state_dict(torch.load(buffer))
    step(resumed, -1.0)
    torch.testing.assert_close(p.item(), 0.890139, rtol=1e-6, atol=0)


def test_param_groups_stay_the_same_objects():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, "sgd", stage=1, lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    kept_list, kept = optimizer.param_groups, optimizer.param_groups[0]
    train(model, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    scheduler.step()
    assert optimizer.param_groups is kept_list
    assert optimizer.param_groups[0] is kept
    assert kept["lr"] == scheduler.get_last_lr()[0] == 0.5
    p = model[0].weight
    before = p.detach().clone()
    optimizer.zero_grad()
    p.sum().backward()
    optimizer.step()
    torch.testing.assert_close(p.detach(), before - 0.5)


def test_what_does_not_fit_is_refused_and_nothing_changes():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    train(model, optimizer, 1)
    good = copy.deepcopy(optimizer.state_dict())

    def refused(change, words, error=ValueError):
        bad = copy.deepcopy(good)
        change(bad)
        with pytest.raises(error, match=words):
            optimizer.load_state_dict(bad)
        now = optimizer.state_dict()
        assert now["param_groups"] == good["param_groups"]
        assert all(
            torch.equal(now["state"][i][k], v)
            for i in range(5)
            for k, v in good["state"][i].items()
        )

    refused(lambda d: d["param_groups"].append({"params": []}), "param groups of")
    refused(lambda d: d["param_groups"][0]["params"].pop(), "param groups of")
    refused(lambda d: d["state"][1].pop("exp_avg"), "'0.bias': expected step, exp_avg")
    refused(lambda d: d["state"][1].update(square_avg=torch.zeros(7)), "'0.bias'.*square_avg")
    refused(lambda d: d["state"][1].update(exp_avg=torch.zeros(6)), "'0.bias'.*exp_avg of shape")
    refused(lambda d: d["param_groups"][0].update(amsgrad=True), "max_exp_avg_sq .* with amsgrad")
    refused(
        lambda d: d["param_groups"][0].update(differentiable=True),
        "differentiable",
        NotImplementedError,
    )
    refused(lambda d: d["param_groups"][0].update(betas=(0.9, 2.0)), "betas")


def test_loading_less_state_clears_the_rest():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    train(model, optimizer, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    del saved["state"][1]
    optimizer.load_state_dict(saved)
    assert list(optimizer.state_dict()["state"]) == [0, 2, 3, 4]


def test_state_dict_hooks_run():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    train(model, optimizer, 1)
    calls = []
    optimizer.register_state_dict_pre_hook(lambda o: calls.append("pre"))
    optimizer.register_state_dict_post_hook(lambda o, d: {**d, "more": 1})
    optimizer.register_load_state_dict_pre_hook(lambda o, d: calls.append(d["more"]))
    optimizer.register_load_state_dict_post_hook(lambda o: calls.append("loaded"))
    optimizer.load_state_dict(optimizer.state_dict())
    assert calls == ["pre", 1, "loaded"]


@stages
@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_full_values(stage, optimizer):
    ours, theirs = make_model(), make_model()
    opt = zero.ZeroOptimizer(ours, optimizer, stage=stage)
    reference = torch.optim.AdamW(theirs.parameters())
    assert zero.full_state(ours[0].weight) == {}
    assert zero.full_grad(ours[0].weight) is None
    for model, stepper in ((ours, opt), (theirs, reference)):
        train(model, stepper, 2)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(zero.full_param(a), b.detach(), rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(zero.full_grad(a), b.grad)
        state = zero.full_state(a)
        assert set(state) == set(reference.state[b])
        for key, value in state.items():
            torch.testing.assert_close(value, reference.state[b][key], rtol=1e-6, atol=1e-9)
    whole = zero.full_param(ours[0].weight)
    whole.zero_()
    assert ours[0].weight.any(), "a copy"


def test_full_values_of_tensors_that_nobody_manages():
    p = nn.Parameter(torch.ones(2))
    assert zero.full_grad(p) is None
    (p * 2).sum().backward()
    assert torch.equal(zero.full_param(p), torch.ones(2))
    assert torch.equal(zero.full_grad(p), torch.full((2,), 2.0))
    with pytest.raises(ValueError, match="ZeroOptimizer"):
        zero.full_state(p)


@stages
def test_gathered(stage):
    model = make_model()
    with zero.gathered(model, writeback=True), torch.no_grad():
        model[0].weight.fill_(1.0)
    optimizer = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=1.0)
    for target in (model, zero.ZeroModule(make_model(), stage=stage), [model[0].weight]):
        with zero.gathered(target), torch.no_grad():
            assert all(p.sum().isfinite() for p in model.parameters())
    with zero.gathered([model[0].weight], writeback=True), torch.no_grad():
        model[0].weight.fill_(2.0)
    model[0].weight.sum().backward()
    optimizer.step()
    assert torch.equal(zero.full_param(model[0].weight), torch.ones(7, 5))
    with pytest.raises(TypeError, match="parameters"), zero.gathered(["weight"]):
        pass
    with pytest.raises(KeyError), zero.gathered(model[0].weight, writeback=True):
        raise KeyError


@stages
def test_functions_of_state(stage):
    ours, fresh = make_model(), make_model(1)
    optimizer = zero.ZeroOptimizer(ours, stage=stage, lr=1e-2)
    train(ours, optimizer, 2)
    again = zero.ZeroOptimizer(fresh, stage=1)
    zero.load_state_dict(fresh, zero.state_dict(ours))
    zero.load_state_dict(again, copy.deepcopy(zero.optimizer_state_dict(optimizer)))
    for model, stepper in ((ours, optimizer), (fresh, again)):
        train(model, stepper, 2, first=2)
    assert_equal(fresh, ours)
    assert set(zero.state_dict(make_model())) == set(make_model().state_dict())
    assert set(zero.state_dict(ours, full=False)) == set(ours.state_dict())
    held = zero.optimizer_state_dict(optimizer, full=False)
    assert held["param_groups"] == optimizer.state_dict()["param_groups"]
    with pytest.raises(TypeError, match="ZeroOptimizer"):
        zero.optimizer_state_dict(torch.optim.SGD(ours.parameters()))
    with pytest.raises(TypeError, match="dict"):
        zero.load_state_dict(ours, None)
    with pytest.raises(TypeError, match="module"):
        zero.load_state_dict(3, {})


@stages
@pytest.mark.parametrize("inner", [False, True])
def test_assigning_load_keeps_the_managed_parameters(stage, inner):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, stage=stage, lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        train(model, stepper, 2)
    managed = list(ours.parameters())
    values = make_model(3).state_dict()
    theirs.load_state_dict(values)
    if inner:  # no hook sees it; a step does
        for i in (0, 2, 3):
            part = {k[2:]: v for k, v in values.items() if k.startswith(f"{i}.")}
            ours[i].load_state_dict(part, assign=True)
        optimizer.zero_grad()
        optimizer.step()
    else:
        ours.load_state_dict(values, assign=True)
    assert all(a is b for a, b in zip(ours.parameters(), managed, strict=True))
    assert_equal(ours, theirs)
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        train(model, stepper, 2, first=2)
    assert_equal(ours, theirs)


def test_a_replaced_parameter_that_does_not_fit_is_an_error_with_its_name():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    model[0].bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError, match=r"'0.bias' was replaced"):
        optimizer.step()
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    model[0].bias = nn.Parameter(torch.zeros(7))
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"'0.bias' was replaced"):
        optimizer.step()


def test_an_added_parameter_is_an_error_with_its_name_until_it_is_registered():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, "sgd", stage=1, lr=1.0)
    model[2].extra = nn.Parameter(torch.ones(2))
    (model[2].extra * 1.5).sum().backward()
    with pytest.raises(RuntimeError, match=r"'2.extra' was added"):
        optimizer.step()
    optimizer.zero_grad()
    optimizer.add_param_group({"params": [model[2].extra]})
    assert optimizer._engine.parameter(5)[0] == "2.extra"
    model[2].extra.grad = None
    (model[2].extra * 1.5).sum().backward()
    optimizer.step()
    assert torch.equal(model[2].extra.detach(), torch.full((2,), -0.5))


def test_a_parameter_unfrozen_later_is_never_left_behind_silently():
    model = make_model()
    model[0].weight.requires_grad_(False)
    optimizer = zero.ZeroOptimizer(model, "sgd", stage=1, lr=1.0)
    train(model, optimizer, 1)
    model[0].weight.requires_grad_(True)
    model[0].weight.grad = torch.ones(7, 5)  # by hand: nothing says what ranks should do with it
    with pytest.raises(RuntimeError, match=r"'0.weight' was frozen when it was wrapped"):
        optimizer.step()
    optimizer.zero_grad()
    before = model[0].weight.detach().clone()
    model[0].weight.sum().backward()
    optimizer.step()
    torch.testing.assert_close(model[0].weight.detach(), before - 1.0)
