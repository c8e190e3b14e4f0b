"""A small GPT, its data, and what one process computes for all ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.norm(x)).unsqueeze(1).chunk(3, -1)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """Tied embedding and head, sizes that no world size divides."""

    def __init__(self, vocab: int = 53, width: int = 11, depth: int = 2, context: int = 8) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, width)
        self.positions = nn.Embedding(context, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_gpt(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT()


def batch(step: int, rank: int, micro: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    return torch.randint(0, 53, (3, 9), generator=generator)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def mean_gradients(model: nn.Module, step: int, world: int) -> list[torch.Tensor]:
    """Each rank's gradient by itself, summed in rank order, divided by the ranks."""
    total: list[torch.Tensor] = []
    for rank in range(world):
        model.zero_grad()
        loss_of(model, batch(step, rank)).backward()
        own = [p.grad.clone() for p in model.parameters()]
        total = own if rank == 0 else [a + b for a, b in zip(total, own, strict=True)]
    return [gradient / world for gradient in total]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), f"{name} differs by {(a[name] - b[name]).abs().max()}"


def assert_close(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rtol: float = 1e-6, atol: float = 1e-6
) -> None:
    for name in b:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=atol)
