"""torch.optim classes on shards: which are taken, which refused, and that they step as in torch."""

import copy

import pytest
import torch
from small_model import make_model, train
from torch import nn

import zero_torch as zero
from zero_torch.elementwise import examine

TAKEN = [
    (torch.optim.AdamW, {}),
    (torch.optim.AdamW, {"amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"foreach": False}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.RMSprop, {"momentum": 0.5, "centered": True}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


class SignDescent(torch.optim.Optimizer):
    """Somebody's own elementwise rule."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p -= group["lr"] * p.grad.sign()


class NormDescent(SignDescent):
    """Looks at a whole parameter."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p -= group["lr"] * p.grad / p.grad.norm()


class TotalNormDescent(SignDescent):
    """Looks at all parameters."""

    @torch.no_grad()
    def step(self, closure=None):
        parameters = [p for group in self.param_groups for p in group["params"]]
        nn.utils.clip_grad_norm_(parameters, 1.0)
        for p in parameters:
            p -= self.param_groups[0]["lr"] * p.grad


class RowDescent(SignDescent):
    """Keeps one number a row."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["rows"] = p.grad.reshape(len(p), -1).sum(1)


class WithClosure(SignDescent):
    def step(self, closure):
        closure()


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize(("cls", "kw"), [*TAKEN, (SignDescent, {})])
def test_steps_as_in_torch(cls, kw, stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, cls, stage=stage, lr=1e-2, **kw)
    reference = cls(theirs.parameters(), lr=1e-2, **kw)
    train(ours, optimizer, 5)
    train(theirs, reference, 5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("cls", "words"),
    [
        (torch.optim.LBFGS, "line search"),
        (torch.optim.Adafactor, "factored"),
        (torch.optim.SparseAdam, "sparse"),
        (NormDescent, "not elementwise"),
        (TotalNormDescent, "not elementwise"),
        (RowDescent, "'rows'"),
        (WithClosure, "failed on a small tensor"),
    ],
)
def test_what_needs_the_whole_is_refused_with_the_reason(cls, words):
    with pytest.raises(ValueError, match=rf"{cls.__name__} can't run on shards.*{words}"):
        zero.ZeroOptimizer(make_model(), cls, stage=1)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="this torch has no Muon")
def test_muon_is_refused():
    with pytest.raises(ValueError, match="orthogonalizes"):
        zero.ZeroOptimizer(nn.Linear(2, 2, bias=False), torch.optim.Muon, stage=1)


@pytest.mark.parametrize("lr", [1e-9, 0.0, 10.0])
def test_the_probe_does_not_depend_on_the_learning_rate(lr):
    examine(torch.optim.AdamW, {"lr": lr})
    if lr:
        with pytest.raises(ValueError, match="not elementwise"):
            examine(NormDescent, {"lr": lr})


def test_the_probe_leaves_random_numbers_alone():
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    examine(torch.optim.AdamW, {})
    assert torch.equal(torch.rand(1), expected)


def test_unknown_hyperparameters_are_refused_by_name():
    with pytest.raises(TypeError, match="bogus"):
        zero.ZeroOptimizer(make_model(), torch.optim.RMSprop, stage=1, bogus=1)


def test_hyperparameters_are_read_live():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.RMSprop, stage=2, lr=1e-2)
    optimizer.param_groups[0]["lr"] = 0.0
    before = copy.deepcopy(list(model.parameters()))
    train(model, optimizer, 1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("cls", [torch.optim.RMSprop, torch.optim.NAdam, torch.optim.AdamW])
@pytest.mark.parametrize("stage", [0, 1])
def test_state_goes_to_plain_torch_and_back(cls, stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, cls, stage=stage, lr=1e-2)
    assert optimizer.state_dict()["state"] == {}
    train(ours, optimizer, 3)
    theirs.load_state_dict(ours.state_dict())
    reference = cls(theirs.parameters(), lr=1e-2)
    saved = optimizer.state_dict()
    reference.load_state_dict(copy.deepcopy(saved))
    assert {k: set(v) for k, v in saved["state"].items()} == {
        k: set(v) for k, v in reference.state_dict()["state"].items()
    }
    fresh = make_model()
    fresh.load_state_dict(ours.state_dict())
    again = zero.ZeroOptimizer(fresh, cls, stage=1, lr=0.5)
    again.load_state_dict(copy.deepcopy(reference.state_dict()))
    for model, stepper in ((ours, optimizer), (theirs, reference), (fresh, again)):
        train(model, stepper, 2, first=3)
        for a, b in zip(model.parameters(), ours.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_loading_does_not_hold_on_to_the_given_tensors():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.RMSprop, stage=1)
    train(model, optimizer, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    before = copy.deepcopy(saved)
    train(model, optimizer, 1)
    for key, state in saved["state"].items():
        assert all(torch.equal(v, before["state"][key][name]) for name, v in state.items())


def test_state_of_another_shape_is_refused():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.RMSprop, stage=1)
    train(model, optimizer, 1)
    saved = optimizer.state_dict()
    saved["state"][0]["square_avg"] = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'0.weight': expected square_avg of shape"):
        optimizer.load_state_dict(saved)


def test_parts_share_the_engine_s_memory_and_state_is_accounted():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, torch.optim.AdamW, stage=2)
    train(model, optimizer, 1)
    for index, part in optimizer._rule._parts.items():
        assert part.data_ptr() == optimizer._engine.shard_parameter(index).data_ptr()
        assert part.grad is None
    numel = sum(p.numel() for p in model.parameters())
    held = zero.report(optimizer).as_dict()["held"]["optimizer_state"]
    assert 8 * numel <= held <= 8 * numel + 4 * len(list(model.parameters()))
