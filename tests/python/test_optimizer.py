"""ZeroOptimizer on one rank against torch.optim: steps, groups, schedulers, closures."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from small_model import assert_equal, batch, loss_of, make_model, stages, train
from torch import nn

import zero_torch as zero
from zero_torch import _registry

RULES = [
    ("adamw", torch.optim.AdamW, {"lr": 1e-2, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {}),
    ("adam", torch.optim.Adam, {"lr": 1e-2, "betas": (0.8, 0.9), "eps": 1e-6}),
    ("adam", torch.optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.2}),
    ("sgd", torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("adamw", torch.optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    ("adam", torch.optim.Adam, {"lr": 1e-2, "amsgrad": True, "weight_decay": 0.1}),
    ("adamw", torch.optim.AdamW, {"lr": 1e-3, "maximize": True}),
    ("adam", torch.optim.Adam, {"lr": 1e-3, "maximize": True, "weight_decay": 0.1}),
    ("sgd", torch.optim.SGD, {"lr": 1e-2, "maximize": True, "momentum": 0.9, "weight_decay": 0.1}),
]


@stages
@pytest.mark.parametrize(("name", "cls", "kw"), RULES)
def test_native_rules_step_as_in_torch(name, cls, kw, stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, name, stage=stage, **kw)
    assert isinstance(optimizer, torch.optim.Optimizer)
    train(ours, optimizer, 6)
    train(theirs, cls(theirs.parameters(), **kw), 6)
    assert_equal(ours, theirs)


def split(model):
    wide = [p for p in model.parameters() if p.dim() > 1]
    narrow = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": wide}, {"params": narrow, "weight_decay": 0.0, "lr": 3e-2}]


@stages
def test_param_groups(stage):
    ours, theirs = make_model(), make_model()
    groups = split(ours)
    optimizer = zero.ZeroOptimizer(groups, stage=stage, lr=1e-2)
    assert "lr" not in groups[0], "the user's dicts stay as they were"
    assert [len(g["params"]) for g in optimizer.param_groups] == [3, 2]
    assert all(
        a is b
        for a, b in zip(optimizer.param_groups[0]["params"], groups[0]["params"], strict=True)
    )
    train(ours, optimizer, 4)
    train(theirs, torch.optim.AdamW(split(theirs), lr=1e-2), 4)
    assert_equal(ours, theirs)


@pytest.mark.parametrize(("name", "cls"), [("adamw", torch.optim.AdamW), ("sgd", torch.optim.SGD)])
def test_groups_have_the_keys_of_torch(name, cls):
    ours = zero.ZeroOptimizer(make_model(), name, stage=1).param_groups[0]
    theirs = cls(make_model().parameters()).param_groups[0]
    assert {k: v for k, v in ours.items() if k != "params"} == {
        k: v for k, v in theirs.items() if k != "params"
    }


@pytest.mark.parametrize("form", ["parameters", "generator", "named", "group of names"])
def test_iterables_of_parameters(form):
    ours, theirs = make_model(), make_model()
    target = {
        "parameters": lambda: list(ours.parameters()),
        "generator": lambda: ours.parameters(),
        "named": lambda: ours.named_parameters(),
        "group of names": lambda: [{"params": ours.named_parameters()}],
    }[form]()
    optimizer = zero.ZeroOptimizer(target, stage=2, lr=1e-2)
    name = "0.weight" if "name" in form else "group 0 parameter 0"
    assert optimizer._engine.parameter(0)[0] == name
    assert ("param_names" in optimizer.param_groups[0]) == ("name" in form)
    train(ours, optimizer, 3)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 3)
    assert_equal(ours, theirs)


@stages
def test_schedulers(stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, stage=stage, lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        scheduler = torch.optim.lr_scheduler.OneCycleLR(stepper, 0.1, total_steps=6)
        for step in range(6):
            train(model, stepper, 1, first=step)
            if step < 5:
                scheduler.step()
    assert_equal(ours, theirs)


def test_a_tensor_learning_rate_is_read_live():
    ours, theirs = make_model(), make_model()
    rate, other = torch.tensor(1e-2), torch.tensor(1e-2)
    optimizer = zero.ZeroOptimizer(ours, stage=1, lr=rate)
    reference = torch.optim.AdamW(theirs.parameters(), lr=other)
    for model, stepper, value in ((ours, optimizer, rate), (theirs, reference, other)):
        train(model, stepper, 1)
        value.fill_(0.2)
        train(model, stepper, 1, first=1)
    assert_equal(ours, theirs)


@stages
def test_a_closure_runs_with_gradients_and_its_loss_is_returned(stage):
    w = nn.Parameter(torch.ones(2))
    optimizer = zero.ZeroOptimizer([w], "sgd", stage=stage, lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = (w**2).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 2.0
    torch.testing.assert_close(w.detach(), torch.full((2,), 0.8))
    assert optimizer.step() is None


@stages
@pytest.mark.parametrize("optimizer", ["adamw", torch.optim.AdamW])
def test_each_parameter_has_its_own_step_count(stage, optimizer):
    a, b = nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))
    opt = zero.ZeroOptimizer([a, b], optimizer, stage=stage, lr=0.1, weight_decay=0.1)
    for i in range(1, 6):
        opt.zero_grad()
        (a * i + (b * 2 * i if i % 2 else 0)).sum().backward()
        opt.step()
    torch.testing.assert_close(a.item(), 0.475581, rtol=2e-6, atol=0)
    torch.testing.assert_close(b.item(), 0.689524, rtol=2e-6, atol=0)
    assert [s["step"].item() for s in opt.state_dict()["state"].values()] == [5, 3]


@stages
def test_backward_several_times_then_a_step(stage):
    for quiet in (False, True):
        w = nn.Parameter(torch.ones(1))
        optimizer = zero.ZeroOptimizer([w], "sgd", stage=stage, lr=1.0)
        for x in (1.0, 2.0):
            if quiet:
                with optimizer.no_sync():
                    (w * x).sum().backward()
            else:
                (w * x).sum().backward()
        (w * 3).sum().backward()
        assert zero.full_grad(w).item() == 6.0
        optimizer.step()
        assert w.item() == -5.0


@stages
@pytest.mark.parametrize("who", ["optimizer", "model", "wrapper"])
@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad_by_anyone_leaves_no_remainder(stage, who, set_to_none):
    ours, theirs = make_model(), make_model()
    wrapper = zero.ZeroModule(ours, stage=stage) if who == "wrapper" else None
    optimizer = zero.ZeroOptimizer(wrapper or ours, stage=stage, lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    clear = {"optimizer": optimizer, "model": ours, "wrapper": wrapper}[who]
    for step in range(4):
        for model, zeroed in ((ours, clear), (theirs, reference)):
            loss_of(model, 10 + step).backward()
            zeroed.zero_grad(set_to_none=set_to_none)
            for p in model.parameters():
                assert (p.grad is None) == set_to_none
                if p.grad is not None:
                    assert p.grad.shape == p.shape
                    assert not zero.full_grad(p).any()
            loss_of(model, step).backward()
        optimizer.step()
        reference.step()
        clear.zero_grad(set_to_none=set_to_none)
        reference.zero_grad(set_to_none=set_to_none)
    assert_equal(ours, theirs)


@stages
def test_add_param_group(stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours[0], stage=stage, lr=1e-2)
    reference = torch.optim.AdamW(theirs[0].parameters(), lr=1e-2)
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        train(model, stepper, 2)
        model.zero_grad()
        rest = [*model[2].parameters(), *model[3].parameters()]
        stepper.add_param_group({"params": rest, "lr": 0.1})
        train(model, stepper, 3, first=2)
    assert_equal(ours, theirs)
    assert len(optimizer.param_groups) == 2
    assert list(optimizer.state_dict()["state"]) == list(range(5))
    with pytest.raises(ValueError, match="managed already"):
        optimizer.add_param_group({"params": [ours[0].weight]})
    with pytest.raises(ValueError, match="eps"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "eps": -1.0})
    with pytest.raises(TypeError, match="dict"):
        optimizer.add_param_group([nn.Parameter(torch.ones(1))])
    assert len(optimizer.param_groups) == 2


def test_add_param_group_of_an_elementwise_class():
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours[0], torch.optim.RMSprop, stage=2)
    reference = torch.optim.RMSprop(theirs[0].parameters())
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        train(model, stepper, 2)
        model.zero_grad()
        rest = [*model[2].parameters(), *model[3].parameters()]
        stepper.add_param_group({"params": rest, "lr": 0.1})
        train(model, stepper, 3, first=2)
    assert_equal(ours, theirs)


@stages
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
def test_clipping(stage, norm_type):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, stage=stage)
    for model in (ours, theirs):
        loss_of(model, 0).backward()
    before = optimizer.grad_norm(norm_type)
    got = optimizer.clip_grad_norm_(torch.tensor(1e-2), norm_type)
    want = nn.utils.clip_grad_norm_(theirs.parameters(), 1e-2, norm_type)
    assert got.shape == ()
    assert got.dtype == torch.float32
    assert torch.equal(got, before)
    torch.testing.assert_close(got, want)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(zero.full_grad(a), b.grad)


@stages
def test_a_norm_without_gradients_is_zero(stage):
    optimizer = zero.ZeroOptimizer(make_model(), stage=stage, on_nonfinite="raise")
    assert optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True).item() == 0.0
    assert [norm.item() for norm in optimizer.grad_norm(per_group=True)] == [0.0]
    optimizer.clip_grad_value_(1.0)
    optimizer.step()


@stages
def test_unusual_parameters(stage):
    ours = [
        nn.Parameter(torch.tensor(2.0)),
        nn.Parameter(torch.zeros(0, 4)),
        nn.Parameter(torch.arange(6.0).view(2, 3).t()),
        nn.Parameter(torch.ones(3, dtype=torch.float64)),
        nn.Parameter(torch.ones(3), requires_grad=False),
        nn.Parameter(torch.ones(3, dtype=torch.int8), requires_grad=False),
    ]
    theirs = copy.deepcopy(ours)
    optimizer = zero.ZeroOptimizer(ours, stage=stage, lr=0.1)
    reference = torch.optim.AdamW(theirs, lr=0.1)
    for p, stepper in ((ours, optimizer), (theirs, reference)):
        for _ in range(2):
            stepper.zero_grad()
            (p[0] * 3 + p[1].sum() + (p[2] ** 2).sum() + (p[3] * 2).sum()).backward()
            stepper.step()
    for a, b in zip(ours, theirs, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
        assert zero.full_param(a).shape == b.shape


def test_ignored_parameters_are_left_alone():
    model = make_model()
    optimizer = zero.ZeroOptimizer(
        model, stage=1, lr=0.1, ignored_params=["0.bias", model[2].weight]
    )
    before = copy.deepcopy(model)
    train(model, optimizer, 2)
    assert len(optimizer.param_groups[0]["params"]) == 3
    assert torch.equal(model[0].bias, before[0].bias)
    assert torch.equal(model[2].weight, before[2].weight)
    assert not torch.equal(model[0].weight, before[0].weight)
    assert type(model[0].bias.grad) is torch.Tensor


def test_hooks_of_steps_run():
    optimizer = zero.ZeroOptimizer(make_model(), stage=1)
    calls = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    optimizer.step()
    assert calls == ["before", "after"]


def test_copies_and_pickles_are_refused_with_the_reason():
    optimizer = zero.ZeroOptimizer(make_model(), stage=1)
    for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(TypeError, match="state_dict"):
            attempt(optimizer)


@stages
def test_nothing_keeps_a_dropped_model_alive(stage):
    for wrapped in (False, True):
        model = make_model()
        target = zero.ZeroModule(model, stage=stage) if wrapped else model
        optimizer = zero.ZeroOptimizer(target, stage=stage)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loss_of(target, 0).backward()
        optimizer.step()
        references = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(optimizer._engine)]
        references += [weakref.ref(p) for p in model.parameters()]
        del model, target, optimizer, scheduler
        gc.collect()
        assert [r() for r in references] == [None] * len(references)


@stages
def test_a_dropped_optimizer_leaves_a_plain_model(stage):
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=stage)
    train(model, optimizer, 2)
    loss_of(model, 2).backward()
    stale = model[0].weight.grad
    del optimizer
    gc.collect()
    assert not model._load_state_dict_post_hooks
    assert not model._state_dict_pre_hooks
    if stage:
        with pytest.raises(RuntimeError, match=r"'0.weight' .* gone"):
            stale.sum()
    model.zero_grad()
    loss_of(model, 3).backward()
    assert type(model[0].weight.grad) is torch.Tensor
    train(model, torch.optim.AdamW(model.parameters()), 2)
    copied = copy.deepcopy(model)
    again = zero.ZeroOptimizer(model, stage=1)
    train(model, again, 1)
    train(copied, torch.optim.AdamW(copied.parameters()), 1)
    assert_equal(model, copied)


def test_two_models_in_turn_for_many_rounds():
    models, twins = [make_model(0), make_model(1)], [make_model(0), make_model(1)]
    hooks = [len(m._state_dict_pre_hooks) for m in models]
    others = list(_registry._engines)  # that tests before this one left
    for turn in range(20):
        model, twin = models[turn % 2], twins[turn % 2]
        optimizer = zero.ZeroOptimizer(model, stage=turn % 3, lr=1e-2)
        train(model, optimizer, 1, first=turn)
        train(twin, torch.optim.AdamW(twin.parameters(), lr=1e-2), 1, first=turn)
        del optimizer
        assert_equal(model, twin)
    assert [len(m._state_dict_pre_hooks) for m in models] == hooks
    assert not [engine for engine in _registry._engines if engine not in others]


@stages
def test_a_copy_of_a_model_is_plain(stage):
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
    train(model, optimizer, 2)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_equal(plain, model)
        before = copy.deepcopy(model)
        train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), 1)
        assert_equal(model, before)
        plain.load_state_dict(model.state_dict(), assign=True)


def test_outputs_agree_with_the_model_in_eval():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=2, lr=0.1)
    with torch.inference_mode():
        model(batch(0))
    train(model, optimizer, 2)
    with torch.no_grad():
        expected = model(batch(0))
    with torch.inference_mode():
        assert torch.equal(model(batch(0)), expected)
