"""Casts of weights under autocast: recomputed in backward, with the same gradients."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from zero_torch._autocast import CastPacking, _Cast, _Packing


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        )

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(*x.shape[:2], 3, 2, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm(x))


class Raw(nn.Module):
    """A weight that is used without a transpose, and a bias."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width) / width)
        self.conv = nn.Conv1d(3, 3, 1)

    def forward(self, x):
        return torch.tanh(self.conv(x @ self.weight))


def make(width=8):
    torch.manual_seed(0)
    return nn.Sequential(Block(width), Raw(width), Block(width))


def packing_of(model):
    managed = {id(p) for p in model.parameters()}
    return CastPacking(lambda t: id(t) in managed)


def attached(model):
    packing = packing_of(model)
    model.register_forward_pre_hook(lambda *_: packing.enter())
    model.register_forward_hook(lambda *_: packing.exit(), always_call=True)
    return packing


def gradients(model, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(x).float().square().mean()
    loss.backward()
    return [p.grad for p in model.parameters()] + [x.grad]


def test_gradients_are_bit_for_bit_those_without():
    x = torch.randn(2, 3, 8)
    plain, packed = make(), make()
    attached(packed)
    ours = gradients(packed, x.clone().requires_grad_())
    theirs = gradients(plain, x.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_second_derivatives_are_those_without():
    results = []
    for prepare in (lambda model: None, attached):
        model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))
        torch.manual_seed(1)
        for p in model.parameters():
            nn.init.normal_(p)
        prepare(model)
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x).float().sum()
        (first,) = torch.autograd.grad(y, x, create_graph=True)
        first.square().sum().backward()
        results.append([p.grad for p in model.parameters() if p.grad is not None])
    assert results[0] and len(results[0]) == len(results[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def saved(model, x):
    """What is kept of a forward: parameters of which a cast is packed, and dtypes of the rest."""
    casts, others = [], []
    packing = _Packing(lambda t: any(t is p for p in model.parameters()), None)

    def pack(tensor):
        packed = packing.pack(tensor)
        if isinstance(packed, _Cast):
            casts.append(packed.parameter)
        else:
            others.append(packed.tensor)
        return packed

    with (
        torch.autograd.graph.saved_tensors_hooks(pack, packing.unpack),
        torch.autocast("cpu", torch.bfloat16, cache_enabled=False),
    ):
        model(x)
    return casts, others


def test_every_matrix_is_recognised():
    model = make()
    casts, _ = saved(model, torch.randn(2, 3, 8, requires_grad=True))
    names = {name for name, p in model.named_parameters() if any(p is c for c in casts)}
    assert names == {name for name, p in model.named_parameters() if p.dim() > 1}


class Casts(TorchDispatchMode):
    """Notes the storages of the low-precision copies that are made inside."""

    def __init__(self):
        super().__init__()
        self.storages = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and result.dtype == torch.bfloat16:
            storage = result.untyped_storage()
            self.storages.append((StorageWeakRef(storage), storage.nbytes()))
        return result

    def live_bytes(self):
        return sum(nbytes for storage, nbytes in self.storages if not storage.expired())


def test_the_graph_keeps_no_casts():
    width, layers = 128, 20
    model = nn.Sequential(*[nn.Linear(width, width) for _ in range(layers)])
    x = torch.randn(2, width)
    live = []
    for prepare in (lambda model: None, attached):
        prepare(model)
        with torch.autocast("cpu", torch.bfloat16), Casts() as casts:
            y = model(x)
            live.append(casts.live_bytes())
        del y
    weights = layers * width * width * 2
    assert live[0] >= weights
    assert live[1] < weights // 100


def test_results_are_not_kept_by_their_own_operation():
    packing = CastPacking(lambda t: False)
    gc.disable()
    try:
        with torch.autocast("cpu", torch.bfloat16):
            packing.enter()
            y = torch.randn(3, requires_grad=True).exp()
            packing.exit()
        gone = weakref.ref(y)
        storage = StorageWeakRef(y.untyped_storage())
        del y
        assert gone() is None and storage.expired()
    finally:
        gc.enable()


def test_is_active_only_where_casts_are_saved():
    packing = CastPacking(lambda t: True)
    packing.enter()
    assert not packing.active
    packing.exit()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            packing.enter()
            assert not packing.active
            packing.exit()
        packing.enter()
        packing.enter()
        assert packing.active and not torch.is_autocast_cache_enabled()
        packing.exit()
        assert packing.active and not torch.is_autocast_cache_enabled()
        packing.exit()
        assert not packing.active and torch.is_autocast_cache_enabled()
        packing.exit()  # one too many
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_an_exception_in_forward_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(5, 5))
    packing = attached(model)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 4))
        assert not packing.active and torch.is_autocast_cache_enabled()
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_hooks_outside_receive_what_is_not_a_cast():
    model = make()
    attached(model)
    packed, unpacked = [], []

    def pack(t):
        packed.append(t.shape)
        return t.detach()

    def unpack(t):
        unpacked.append(t.shape)
        return t

    x = torch.randn(2, 3, 8)
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        ours = gradients(model, x.clone().requires_grad_())
    assert packed and len(unpacked) >= len(packed) // 2
    assert torch.Size([24, 8]) not in packed and torch.Size([8, 24]) not in packed
    theirs = gradients(make(), x.clone().requires_grad_())
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def test_a_step_before_backward_is_refused():
    model = nn.Linear(4, 4)
    attached(model)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(torch.ones(1, 4, requires_grad=True)).sum()
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


def test_a_modified_activation_is_refused():
    packing = CastPacking(lambda t: True)
    with torch.autocast("cpu", torch.bfloat16):
        packing.enter()
        x = torch.ones(3, requires_grad=True) * 1
        y = (x * x).sum()
        packing.exit()
    x.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(
            lambda w: w.to(torch.bfloat16, memory_format=torch.channels_last), id="layout"
        ),
        pytest.param(lambda w: (w * 2).to(torch.bfloat16), id="computed"),
        pytest.param(lambda w: w.to(torch.bfloat16).detach().mul_(2), id="modified"),
        pytest.param(lambda w: w, id="not cast"),
    ],
)
def test_what_is_not_a_plain_cast_is_kept(use):
    weight = nn.Parameter(torch.randn(2, 3, 4, 5))
    packing = _Packing(lambda t: t is weight, None)
    tensor = use(weight)
    packed = packing.pack(tensor)
    assert not isinstance(packed, _Cast)
    assert torch.equal(packing.unpack(packed), tensor)


def test_views_of_a_cast_come_back_as_they_were():
    weight = nn.Parameter(torch.randn(6, 4).t())  # dense, not contiguous
    packing = _Packing(lambda t: t is weight, None)
    cast = weight.to(torch.bfloat16)
    for view in (
        cast,
        cast.t(),
        cast[1:, 2],
        cast.t().reshape(3, 8),
        cast.unsqueeze(0).expand(2, -1, -1),
    ):
        packed = packing.pack(view)
        assert isinstance(packed, _Cast)
        back = packing.unpack(packed)
        assert torch.equal(back, view) and back.stride() == view.stride()


def test_frozen_parameters_are_left():
    model = nn.Linear(4, 4).requires_grad_(False)
    casts, others = saved(model, torch.ones(1, 4, requires_grad=True))
    assert casts == [] and others
