"""The models that benchmarks train, and their sizes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.attention_norm(x)).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, vocab: int, dim: int, layers: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList([Block(dim, max(1, dim // 64)) for _ in range(layers)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Cell(nn.Module):
    """A block of linear layers with 1, 2 or any even number of parameters."""

    def __init__(self, width: int, parameters: int = 2) -> None:
        super().__init__()
        count, bias = max(1, parameters // 2), parameters > 1
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=bias) for _ in range(count)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class Cells(nn.Module):
    """``blocks`` cells in a row, each a unit."""

    def __init__(self, blocks: int, width: int, parameters: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Cell(width, parameters) for _ in range(blocks)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


@dataclass(frozen=True)
class Task:
    """A model, the class of its blocks, and a loss on a batch that a generator draws."""

    title: str
    make: Callable[[], nn.Module]
    block: type[nn.Module]
    loss: Callable[[nn.Module, torch.Generator], torch.Tensor]


def _gpt(title: str, layers: int, dim: int, batch: int, context: int, vocab: int = 1024) -> Task:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        tokens = torch.randint(0, vocab, (batch, context + 1), generator=generator)
        logits = model(tokens[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    positions = max(128, context) if dim < 768 else context
    return Task(title, lambda: GPT(vocab, dim, layers, positions), Block, loss)


def _cells(title: str, blocks: int, width: int, parameters: int) -> Task:
    def loss(model: nn.Module, generator: torch.Generator) -> torch.Tensor:
        return model(torch.randn(8, width, generator=generator)).square().mean()

    return Task(title, lambda: Cells(blocks, width, parameters), Cell, loss)


TASKS = {
    "small": _gpt("GPT 5.3 M, 512 tokens a rank", 6, 256, batch=4, context=128),
    "large": _gpt("GPT 58 M, 64 tokens a rank", 8, 768, batch=1, context=64),
    "many": _cells("2048 parameters of 2.1 M elements, 32 blocks", 32, 45, 64),
    "tiny": _gpt("GPT 0.2 M", 2, 64, batch=1, context=16, vocab=64),
}
