"""Two steps of a GPT of a billion parameters: 16 GB of fp32 state, built without storage.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 4 benchmarks/billion.py

At stage 0 each rank would hold 16 GB; at stage 3 on 4 ranks 4 GB and two units.
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from models import GPT

import zero_torch as zero


def gib(kib: float) -> str:
    return f"{kib / 2**20:.2f} GiB"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stage", type=int, default=3)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    zero.init()
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    with zero.deferred_init():
        model = GPT(1024, args.dim, args.layers, 64)
    start = time.perf_counter()
    opt = zero.ZeroOptimizer(model, stage=args.stage, lr=1e-4)
    built = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if rank == 0:
        count = sum(p.numel() for p in model.parameters())
        seconds = time.perf_counter() - start
        print(
            f"{count / 1e9:.3f} billion parameters, sharded in {seconds:.0f} s, peak {gib(built)}"
        )
    generator = torch.Generator().manual_seed(rank)
    for step in range(args.steps):
        start = time.perf_counter()
        tokens = torch.randint(0, 1024, (1, 17), generator=generator)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if rank == 0:
            seconds = time.perf_counter() - start
            print(f"step {step + 1}: loss {loss.item():.4f}, {seconds:.1f} s", flush=True)
    if rank == 0:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        print(f"peak of a rank: {gib(peak)}\n{zero.report(opt)}")


if __name__ == "__main__":
    main()
