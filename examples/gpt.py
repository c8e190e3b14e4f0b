"""A small GPT over bytes: pre-norm blocks, learned positions, output weights tied to the embedding.

examples/gpt.h is the same model in C++: the same names in the same order, the same initial bits.
"""

import math

import torch
import torch.nn.functional as F
from torch import nn

VOCABULARY = 256


class Block(nn.Module):
    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(dim)
        self.attention_in = nn.Linear(dim, 3 * dim)
        self.attention_out = nn.Linear(dim, dim)
        self.mlp_norm = nn.LayerNorm(dim)
        self.mlp_in = nn.Linear(dim, 4 * dim)
        self.mlp_out = nn.Linear(4 * dim, dim)

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        def split(t: torch.Tensor) -> torch.Tensor:
            return t.unflatten(-1, (self.heads, -1)).transpose(1, 2)

        query, key, value = map(split, self.attention_in(x).chunk(3, dim=-1))
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(self.attention_norm(x))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    def __init__(self, layers: int, dim: int, heads: int, context: int):
        super().__init__()
        self.context = context
        self.tokens = nn.Embedding(VOCABULARY, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens) + self.positions(
            torch.arange(tokens.shape[1], device=tokens.device)
        )
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


@torch.no_grad()
def initialise(model: GPT, seed: int) -> None:
    """Draws every weight from one generator, in the order of `named_parameters`."""
    generator = torch.Generator().manual_seed(seed)
    residual = 0.02 / math.sqrt(2.0 * len(model.blocks))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "norm" in name:
            parameter.fill_(1.0)
        else:
            std = residual if "_out." in name else 0.02
            parameter.normal_(0.0, std, generator=generator)


@torch.no_grad()
def generate(model: GPT, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> bytes:
    """`prompt` and `length` sampled bytes. Every rank must call it: a forward can communicate."""
    generator = torch.Generator().manual_seed(seed)
    device = model.tokens.weight.device
    tokens = torch.tensor([list(prompt)])
    for _ in range(length):
        logits = model(tokens[:, -model.context :].to(device))[0, -1].cpu()
        probabilities = torch.softmax(logits / temperature, dim=-1)
        drawn = torch.multinomial(probabilities, 1, generator=generator)
        tokens = torch.cat([tokens, drawn.unsqueeze(0)], dim=1)
    return bytes(tokens[0].tolist())
