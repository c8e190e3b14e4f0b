"""One rank of a benchmark run: trains a GPT by one strategy, prints JSON."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
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


def adamw(model: nn.Module, fused: bool = False) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True if fused else None)


def wrap(strategy: str, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    if strategy.startswith("zero") and strategy[4:].isdigit():
        import zero_torch as zero

        return model, zero.ZeroOptimizer(model, stage=int(strategy[4:]), lr=1e-3)
    if strategy.startswith("plain"):
        return model, adamw(model, strategy.endswith("fused"))
    if strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model, adamw(model)
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model)
    if strategy == "zero_redundancy":
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return wrapped, ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3)
    return wrapped, adamw(wrapped, strategy.endswith("fused"))


def status(key: str) -> float:
    """A field of this process's status, in MB."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) / 1024
    raise KeyError(key)


def timed(step: Callable[[int], None], warmup: int, steps: int) -> list[float]:
    seconds = []
    for index in range(warmup + steps):
        if index == warmup:
            Path("/proc/self/clear_refs").write_text("5")  # the peak starts again
        began = time.perf_counter()
        step(index)
        seconds.append(time.perf_counter() - began)
    return seconds[warmup:]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("strategy")
    defaults = {"layers": 6, "dim": 256, "batch": 4, "context": 128, "vocab": 1024, "steps": 10}
    for name, value in defaults.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if not arguments.strategy.startswith("plain"):
        dist.init_process_group("gloo", rank=rank, world_size=world)
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()
    idle = status("VmRSS")
    torch.manual_seed(0)
    model, optimizer = wrap(
        arguments.strategy,
        GPT(arguments.vocab, arguments.dim, arguments.layers, arguments.context),
    )
    generator = torch.Generator().manual_seed(1 + rank)
    shape = (3 + arguments.steps, arguments.batch, arguments.context + 1)
    data = torch.randint(0, arguments.vocab, shape, generator=generator)

    def step(index: int) -> None:
        tokens = data[index]
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, 3, arguments.steps)
    result = {"seconds": statistics.median(seconds), "peak_mb": status("VmHWM") - idle}
    if rank == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
