"""Models for tests of deferred_init() and Materializer, and how both are compared."""

import torch
from torch import nn

import zero_torch as zero
from zero_torch.deferred import Materializer


class Scale(nn.Module):
    """Somebody's own module: parameters, a persistent buffer and two that are not."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.shift = nn.Parameter(torch.empty(width, dtype=torch.float64), requires_grad=False)
        self.register_buffer("count", torch.tensor([3, 4]))
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("mask", torch.tensor([True, False]), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.uniform_(self.weight)
        self.shift.data.normal_()


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.scale = Scale(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width)
        )

    def forward(self, x):
        y = self.norm(x)
        return x + self.mlp(self.attention(y, y, y)[0] * self.scale.weight)


class GPT(nn.Module):
    def __init__(self, width=8, tie=True, bias=True):
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(3)])
        self.norm = nn.BatchNorm1d(width)
        self.head = nn.Linear(width, 11, bias=bias)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)).transpose(1, 2))


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(3))


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", torch.arange(4), persistent=False)


def deferred(make, *args, **kwargs):
    with zero.deferred_init():
        return make(*args, **kwargs)


def on_meta(make, *args, **kwargs):
    with torch.device("meta"):
        return make(*args, **kwargs)


def seeded(make, seed=5):
    torch.manual_seed(seed)
    return make()


def names_of(model):
    return [name for name, _ in model.named_parameters()]


def tensors_of(model):
    return dict([*model.named_parameters(), *model.named_buffers()])


def assert_same(ours, theirs):
    ours, theirs = tensors_of(ours), tensors_of(theirs)
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].device == tensor.device, name
        assert ours[name].dtype == tensor.dtype, name
        assert ours[name].requires_grad == tensor.requires_grad, name
        assert torch.equal(ours[name], tensor), name


def materialized(model, seed=5, **settings):
    materializer = Materializer(model, **settings)
    materializer.check()
    torch.manual_seed(seed)
    materializer.materialize(names_of(model))
    materializer.finish()
    assert not materializer.needed
    return model


def ones(module):
    for parameter in module.parameters(recurse=False):
        parameter.data.fill_(1)  # which leaves the version
