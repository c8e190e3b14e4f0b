"""ZeroModule: what passes through to the inner module, and who owns the engine."""

import copy
import gc
import pickle

import pytest
import torch
from small_model import loss_of, make_model, train
from torch import nn

import zero_torch as zero


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("scale", torch.ones(2))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.config = {"width": 2}

    @property
    def broken(self):
        return self.config["a"].missing_inside

    @property
    def width(self):
        return self.config["width"]

    def encode(self, x):
        return self.layer(x) * self.scale

    def forward(self, x, *, twice=False):
        return self.encode(x) * (2 if twice else 1)


@pytest.fixture
def wrapped():
    torch.manual_seed(0)
    return zero.ZeroModule(Model(), stage=1)


def test_reads_pass_through(wrapped):
    inner = wrapped.module
    assert type(inner) is Model
    assert wrapped.config is inner.config
    assert wrapped.width == 2
    assert wrapped.scale is inner.scale
    assert wrapped.layer is inner.layer
    assert torch.equal(wrapped.encode(torch.ones(2)), inner.encode(torch.ones(2)))
    assert torch.equal(wrapped(torch.ones(2), twice=True), 2 * inner(torch.ones(2)))
    assert {"config", "layer", "encode", "no_sync"} <= set(dir(wrapped))


def test_missing_names_name_the_inner_class(wrapped):
    assert not hasattr(wrapped, "missing")
    with pytest.raises(AttributeError, match="'Model' object has no attribute 'missing'"):
        _ = wrapped.missing


def test_a_property_s_own_error_is_not_masked(wrapped):
    wrapped.config["a"] = object()
    with pytest.raises(AttributeError, match="missing_inside"):
        _ = wrapped.broken


def test_writes_reach_the_inner_module(wrapped):
    wrapped.temperature = 3.0
    wrapped.extra = nn.ReLU()
    assert wrapped.module.temperature == 3.0
    assert "extra" in wrapped.module._modules
    assert "temperature" not in wrapped.__dict__
    del wrapped.temperature
    del wrapped.extra
    assert not hasattr(wrapped.module, "temperature")
    assert not hasattr(wrapped, "extra")


def test_modes_pass_through(wrapped):
    assert wrapped.eval() is wrapped
    assert not wrapped.training
    assert not wrapped.module.training
    assert not wrapped.layer.training
    assert wrapped.train().layer.training
    seen = []
    assert wrapped.apply(seen.append) is wrapped
    assert wrapped.module in seen
    assert wrapped not in seen


def test_containers_pass_through(wrapped):
    stack = zero.ZeroModule(make_model(), stage=0)
    assert len(stack) == 4
    assert stack[0] is stack.module[0]
    assert list(stack) == list(stack.module)
    assert stack[0] in stack
    assert bool(wrapped)
    assert bool(zero.ZeroModule(nn.Sequential(nn.Linear(1, 1)), stage=0))
    with pytest.raises(TypeError, match="Model"):
        len(wrapped)
    with pytest.raises(TypeError, match="Model"):
        iter(wrapped)


def test_names_are_those_of_the_plain_model(wrapped):
    plain = Model()
    names = ["scale", "layer.weight", "layer.bias"]
    assert list(wrapped.state_dict()) == list(plain.state_dict()) == names
    assert [n for n, _ in wrapped.named_parameters()] == [n for n, _ in plain.named_parameters()]
    assert [n for n, _ in wrapped.named_buffers()] == [n for n, _ in plain.named_buffers()]
    assert [n for n, _ in wrapped.named_modules()] == [n for n, _ in plain.named_modules()]
    assert next(iter(wrapped.state_dict(prefix="a."))) == "a.scale"
    plain.load_state_dict(wrapped.state_dict())
    wrapped.load_state_dict(Model().state_dict())
    with pytest.raises(RuntimeError, match=r'"layer.weight"'):
        wrapped.load_state_dict({"scale": torch.ones(2)})


def test_names_inside_another_module():
    outer = nn.ModuleDict({"body": zero.ZeroModule(Model(), stage=1), "head": nn.Linear(2, 1)})
    plain = nn.ModuleDict({"body": Model(), "head": nn.Linear(2, 1)})
    assert list(outer.state_dict()) == list(plain.state_dict())
    outer.load_state_dict(plain.state_dict())
    plain.load_state_dict(outer.state_dict())
    managed = outer["body"].layer.weight
    outer.load_state_dict(plain.state_dict(), assign=True)
    outer["body"](torch.ones(2))  # notices
    assert outer["body"].layer.weight is managed


def test_an_optimizer_uses_the_module_s_engine():
    ours, theirs = zero.ZeroModule(make_model(), stage=2), make_model()
    optimizer = zero.ZeroOptimizer(ours, lr=1e-2)
    assert optimizer._engine is ours._engine
    train(ours, optimizer, 3)
    train(theirs, torch.optim.AdamW(theirs.parameters(), lr=1e-2), 3)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_dropping_the_optimizer_leaves_the_module_sharded():
    model = zero.ZeroModule(make_model(), stage=1)
    optimizer = zero.ZeroOptimizer(model, stage=1)
    with pytest.raises(ValueError, match="has an optimizer already"):
        zero.ZeroOptimizer(model)
    train(model, optimizer, 1)
    del optimizer
    model.zero_grad()
    loss_of(model, 0).backward()
    assert type(model[0].weight.grad).__name__ == "ShardedGradient"
    zero.ZeroOptimizer(model)


def test_settings_belong_to_the_module(wrapped):
    with pytest.raises(ValueError, match="stage=1, got stage=2"):
        zero.ZeroOptimizer(wrapped, stage=2)
    with pytest.raises(ValueError, match="bucket_bytes"):
        zero.ZeroOptimizer(wrapped, bucket_bytes=5)
    with pytest.raises(ValueError, match="config"):
        zero.ZeroOptimizer(wrapped, config=zero.ZeroConfig())
    with pytest.raises(ValueError, match=r"managed already.*ZeroModule itself"):
        zero.ZeroOptimizer(wrapped.parameters(), stage=1)


def test_bad_modules_are_refused(wrapped):
    with pytest.raises(ValueError, match="already"):
        zero.ZeroModule(wrapped, stage=1)
    with pytest.raises(TypeError, match=r"nn\.Module"):
        zero.ZeroModule([nn.Linear(1, 1)], stage=1)
    with pytest.raises(TypeError, match="stage"):
        zero.ZeroModule(Model(), stage=True)
    with pytest.raises(TypeError, match="nonsense"):
        zero.ZeroModule(Model(), stage=1, nonsense=2)


def test_no_sync_and_its_switch():
    w = nn.Linear(1, 1, bias=False)
    model = zero.ZeroModule(w, stage=2)
    with model.no_sync():
        model(torch.ones(1, 1)).sum().backward()
        with model.no_sync():
            pass
        assert not model._engine.requires_gradient_sync()
    model.set_requires_gradient_sync(False)
    model(torch.ones(1, 1)).sum().backward()
    model.set_requires_gradient_sync(True)
    model(torch.ones(1, 1)).sum().backward()
    assert zero.full_grad(w.weight).item() == 3.0
    model.unshard()
    model.reshard()


def test_copies_and_pickles_are_plain(wrapped):
    for plain in (copy.deepcopy(wrapped), pickle.loads(pickle.dumps(wrapped))):
        assert type(plain) is Model
        assert torch.equal(plain.layer.weight, wrapped.layer.weight)
        plain(torch.ones(2)).sum().backward()
        assert type(plain.layer.weight.grad) is torch.Tensor


def test_moving_passes_through(wrapped):
    managed = wrapped.layer.weight
    assert wrapped.to("cpu") is wrapped
    assert wrapped.layer.weight is managed
    assert wrapped.float() is wrapped


def test_repr_says_what_it_is(wrapped):
    text = repr(wrapped)
    assert "Model, stage=1, rank 0 of 1" in text
    assert "(layer): Linear" in text


def test_dropping_the_wrapper_leaves_a_plain_module():
    inner = make_model()
    model = zero.ZeroModule(inner, stage=2)
    loss_of(model, 0).backward()
    del model
    gc.collect()
    assert not inner._state_dict_pre_hooks
    assert not inner._load_state_dict_post_hooks
    inner.zero_grad()
    loss_of(inner, 0).backward()
    assert type(inner[0].weight.grad) is torch.Tensor
