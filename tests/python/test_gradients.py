"""What `.grad` is after a reduction at stages 1 and 2."""

import copy
import gc
import pickle

import pytest
import torch
from small_model import loss_of, make_model
from torch import nn

import zero_torch as zero
from zero_torch.gradients import ShardedGradient

sharded = pytest.mark.parametrize("stage", [1, 2])


def reduced(stage):
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=stage, lr=1e-2)
    loss_of(model, 0).backward()
    return model, optimizer


def test_stage_0_has_plain_gradients():
    model, _ = reduced(0)
    assert type(model[0].weight.grad) is torch.Tensor
    assert model[0].weight.grad.norm() > 0


@sharded
def test_looks_like_the_parameter(stage):
    model, _optimizer = reduced(stage)
    for name, p in model.named_parameters():
        assert isinstance(p.grad, ShardedGradient)
        assert p.grad.shape == p.shape
        assert p.grad.stride() == p.stride()
        assert p.grad.dtype == p.dtype
        assert p.grad.device == p.device
        assert p.grad.numel() == p.numel()
        assert not p.grad.requires_grad
        assert not p.grad.is_sparse
        assert p.grad.grad_fn is None
        for text in (repr(p.grad), str(p.grad), f"{p.grad}"):
            assert name in text
            assert "rank 0 of 1" in text
    assert "0.weight" in repr([model[0].weight.grad])


READS = {
    "norm": lambda g: g.norm(),
    "sum": lambda g: g.sum(),
    "clone": lambda g: g.clone(),
    "copy": lambda g: torch.empty_like(g, device="cpu").copy_(g),
    "add": lambda g: g + 1,
    "mul": lambda g: g * 2,
    "add_": lambda g: g.add_(1),
    "clamp_ by tensors": lambda g: g.clamp_(torch.zeros(g.shape), torch.ones(g.shape)),
    "clamp": lambda g: g.clamp(-1, 1),
    "mul_ by a tensor": lambda g: g.mul_(torch.ones(g.shape)),
    "mul_ by itself": lambda g: g.mul_(g),
    "item": lambda g: g.flatten()[0].item(),
    "index": lambda g: g[0],
    "view": lambda g: g.view(-1),
    "to": lambda g: g.double(),
    "numpy": lambda g: g.numpy(),
    "tolist": lambda g: g.tolist(),
    "data_ptr": lambda g: g.data_ptr(),
    "storage": lambda g: g.untyped_storage(),
    "bool": lambda g: bool((g > 0).any()),
    "foreach": lambda g: torch._foreach_norm([g]),
    "foreach_add_": lambda g: torch._foreach_add_([g], 1),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "isfinite": lambda g: torch.isfinite(g).all(),
    "stack": lambda g: torch.stack([g, g]),
}


@sharded
@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_what_needs_the_whole_raises_with_name_and_remedy(stage, read):
    model, _optimizer = reduced(stage)
    with pytest.raises(RuntimeError, match=r"'0.weight' is sharded \(rank 0 of 1\)") as error:
        read(model[0].weight.grad)
    assert "optimizer.clip_grad_norm_" in str(error.value)
    assert "zero_torch.full_grad(p)" in str(error.value)


@sharded
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_s_clipping_raises_and_names_ours(stage, foreach):
    model, _optimizer = reduced(stage)
    with pytest.raises(RuntimeError, match=r"optimizer.clip_grad_norm_"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=foreach)


@sharded
@pytest.mark.parametrize("foreach", [None, True, False])
def test_torch_s_clipping_by_value_is_right(stage, foreach):
    model, _optimizer = reduced(stage)
    before = [zero.full_grad(p) for p in model.parameters()]
    nn.utils.clip_grad_value_(model.parameters(), 0.01, foreach=foreach)
    for p, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(zero.full_grad(p), gradient.clamp(-0.01, 0.01))
    model[0].weight.grad.clamp_(max=0.0)
    assert torch.equal(zero.full_grad(model[0].weight), before[0].clamp(-0.01, 0.0))
    model[0].weight.grad.clamp_min_(-0.005)
    assert torch.equal(zero.full_grad(model[0].weight), before[0].clamp(-0.005, 0.0))


@sharded
@pytest.mark.parametrize("kw", [{}, {"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("cls", [torch.optim.AdamW, torch.optim.SGD])
def test_a_plain_optimizer_is_refused_by_name(stage, cls, kw):
    model = zero.ZeroModule(make_model(), stage=stage)
    plain = cls(model.parameters(), **kw)
    loss_of(model, 0).backward()
    with pytest.raises(RuntimeError, match=r"zero_torch.ZeroOptimizer"):
        plain.step()


@sharded
def test_scaling_and_zeroing_act_on_the_shard(stage):
    model, _optimizer = reduced(stage)
    p = model[0].weight
    before = zero.full_grad(p)
    assert p.grad.mul_(2) is p.grad
    p.grad.div_(torch.tensor(4.0))
    p.grad.detach().mul_(3.0)
    p.grad.data.mul_(1.0)
    p.grad *= 2
    torch.testing.assert_close(zero.full_grad(p), before * 3)
    gradients = [q.grad for q in model.parameters()]
    torch._foreach_mul_(gradients, 2.0)
    torch._foreach_div_(gradients, torch.tensor(4.0))
    torch.testing.assert_close(zero.full_grad(p), before * 1.5)
    torch._foreach_zero_(gradients)
    assert not any(zero.full_grad(q).any() for q in model.parameters())


@sharded
def test_stays_itself_over_backwards(stage):
    model, optimizer = reduced(stage)
    first = model[0].weight.grad
    loss_of(model, 0).backward()
    assert model[0].weight.grad is first
    optimizer.zero_grad()
    assert model[0].weight.grad is None
    loss_of(model, 0).backward()
    assert model[0].weight.grad is first


@sharded
def test_an_unused_parameter_has_none(stage):
    a, b = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = zero.ZeroOptimizer([a, b], stage=stage)
    a.sum().backward()
    assert b.grad is None
    assert zero.full_grad(b) is None
    optimizer.step()
    assert list(optimizer.state_dict()["state"]) == [0]


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_grad_scaler(stage):
    ours, theirs = make_model(), make_model()
    optimizer = zero.ZeroOptimizer(ours, stage=stage, lr=1e-2)
    reference = torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for model, stepper in ((ours, optimizer), (theirs, reference)):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            stepper.zero_grad()
            loss = loss_of(model, step)
            if step == 1:
                loss = loss + model[0].bias[0] * float("inf")
            scaler.scale(loss).backward()
            if step == 2:
                scaler.unscale_(stepper)
                norm = (
                    stepper.clip_grad_norm_(0.1)
                    if stepper is optimizer
                    else nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                )
            scaler.step(stepper)
            scaler.update()
            assert scaler.get_scale() == (512.0 if step else 1024.0)
        model.norm = norm
    torch.testing.assert_close(ours.norm, theirs.norm)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@sharded
def test_outlives_its_engine_harmlessly(stage):
    model, optimizer = reduced(stage)
    gradient = model[0].weight.grad
    del optimizer
    gc.collect()
    assert "no engine" in repr(gradient)
    with pytest.raises(RuntimeError, match="gone"):
        gradient.zero_()
