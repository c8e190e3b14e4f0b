"""A small model and its training, for tests against plain torch in one process."""

import pytest
import torch
from torch import nn

stages = pytest.mark.parametrize("stage", [0, 1, 2])


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3, bias=False), nn.Linear(3, 3))


def batch(step):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(4, 5, generator=generator)


def loss_of(model, step):
    return ((model(batch(step)) - torch.tensor([1.0, -2.0, 3.0])) ** 2).mean()


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return model


def assert_equal(ours, theirs):
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)
