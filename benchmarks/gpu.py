"""Zero on one CUDA device, beside torch's fused AdamW, DDP and FSDP2.

    python benchmarks/gpu.py [--rounds 5] [--elements 268435456] [--page FOLDER]

- Kernels: the step and the norm of a flat model, by CUDA events, as a share of the rate of a
  device-to-device copy; torch's fused AdamW in the same rounds.
- Host time by unit and step of many tiny layers: one rank over NCCL, and as rank 0 of torch's
  "fake" group of 8, whose collectives move nothing.
- Step time and peak memory of a GPT, the same two ways, and what the table of docs/concepts.md says
  that the rank holds.

Each variant runs in a process of its own, in turn. Prints tables, and writes them with the GPU, the
versions and the date as FOLDER/README.md (default: benchmarks/results/DATE-gpu). Without a CUDA
device it says so.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from common import ROOT, free_port
from torch import nn

HERE = Path(__file__).resolve()
FAKE_RANKS = 8
UNITS, TINY = 64, 32
WIDTH, DEPTH, CONTEXT, BATCH, VOCABULARY = 2048, 12, 1024, 4, 32768
STRATEGIES = ["plain", "ddp", "fsdp2", "zero0", "zero1", "zero2", "zero3"]
# Bytes that a kernel reads and writes for an element.
BYTES = {
    "copy": 8,
    "torch's fused AdamW, fp32": 28,
    "step, fp32": 28,
    "step, bf16 with fp32 masters": 28,
    "norm, fp32": 4,
}


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.shape[-1] // 64
        q, k, v = (
            part.unflatten(-1, (heads, 64)).transpose(1, 2)
            for part in self.qkv(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.Sequential(*[Block(WIDTH) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits = self.head(self.blocks(self.tokens(tokens[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


# ---- one variant, in a process of its own ----


def join_group(ranks: int) -> None:
    """NCCL of one rank, or torch's fake group."""
    if ranks == 1:
        dist.init_process_group("cpu:gloo,cuda:nccl")
        return
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)


def wrap(strategy: str, model: nn.Module, unit: type[nn.Module]) -> tuple[nn.Module, Any]:
    """The model as it is called, and its optimizer: fused AdamW everywhere."""
    if strategy.startswith("zero"):
        import zero_torch as zero

        settings: dict[str, Any] = {"units": [unit], "min_unit_numel": 0}
        if dist.get_world_size() == 1:
            settings["transport"] = "nccl"
        return model, zero.ZeroOptimizer(model, stage=int(strategy[-1]), lr=1e-4, **settings)
    if strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(model, device_ids=[0])
    elif strategy == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cuda", (dist.get_world_size(),))
        for module in model.modules():
            if isinstance(module, unit):
                fully_shard(module, mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measure_host(strategy: str, steps: int) -> dict[str, float]:
    """Seconds of the host for a step, before it waits for the device."""
    model = nn.Sequential(*[nn.Linear(TINY, TINY, device="cuda") for _ in range(UNITS)])
    called, optimizer = wrap(strategy, model, nn.Linear)
    x = torch.randn(8, TINY, device="cuda")
    times = []
    for step in range(steps + 10):
        torch.cuda.synchronize()
        began = time.perf_counter()
        called(x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= 10:
            times.append(time.perf_counter() - began)
    return {"host": statistics.median(times)}


def measure_step(strategy: str, steps: int) -> dict[str, float]:
    """Seconds of a step in bf16 autocast, peak bytes, and bytes held in theory."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = GPT()
    numel = sum(p.numel() for p in model.parameters())
    called, optimizer = wrap(strategy, model, Block)
    tokens = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), device="cuda")
    peaks = []

    def step() -> None:
        with torch.autocast("cuda", torch.bfloat16):
            loss = called(tokens)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(5):
        step()
    for _ in range(3):
        torch.cuda.reset_peak_memory_stats()
        step()
        peaks.append(torch.cuda.max_memory_allocated())
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    end.synchronize()
    stage = int(strategy[-1]) if strategy.startswith("zero") else 3 if strategy == "fsdp2" else 0
    sharded = {0: 0, 1: 8, 2: 12, 3: 16}[stage]
    held = numel * (16 - sharded) + numel * sharded // dist.get_world_size()
    return {
        "step": begin.elapsed_time(end) / 1e3 / steps,
        "peak": max(peaks),
        "same_peak": float(len(set(peaks)) == 1),
        "held": held,
    }


def measure_kernels(elements: int, rounds: int) -> dict[str, float]:
    """Seconds of each kernel, the median of the rounds."""
    import zero_torch as zero

    class Flat(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(elements, device="cuda"))

    def with_gradient(model: nn.Module) -> None:
        (model.weight * 1e-3).sum().backward()

    source = torch.zeros(elements, device="cuda")
    target = torch.empty_like(source)
    plain = Flat()
    plain.weight.grad = torch.full_like(plain.weight, 1e-3)
    fused = torch.optim.AdamW(plain.parameters(), lr=1e-4, fused=True)
    models = [Flat(), Flat()]
    size = 4 * elements
    settings: dict[str, Any] = {"stage": 0, "lr": 1e-4, "bucket_bytes": size}
    settings["first_bucket_bytes"] = size
    whole = zero.ZeroOptimizer(models[0], **settings)
    masters = zero.ZeroOptimizer(models[1], param_dtype=torch.bfloat16, **settings)
    for model in models:
        with_gradient(model)
    actions: dict[str, Callable[[], object]] = {
        "copy": lambda: target.copy_(source),
        "torch's fused AdamW, fp32": fused.step,
        "step, fp32": whole.step,
        "step, bf16 with fp32 masters": masters.step,
        "norm, fp32": whole.grad_norm,
    }
    times: dict[str, list[float]] = {name: [] for name in actions}
    for _ in range(rounds + 2):
        for name, action in actions.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(5):
                action()
            end.record()
            end.synchronize()
            times[name].append(begin.elapsed_time(end) / 1e3 / 5)
    return {name: statistics.median(values[2:]) for name, values in times.items()}


def run_variant(options: argparse.Namespace) -> None:
    kind, strategy, ranks = options.variant
    join_group(int(ranks))
    if kind == "kernels":
        result = measure_kernels(options.elements, options.rounds)
    elif kind == "host":
        result = measure_host(strategy, options.steps)
    else:
        result = measure_step(strategy, options.steps)
    print(json.dumps(result), flush=True)
    os._exit(0)  # NCCL's threads


# ---- all of them ----


def measured(kind: str, strategy: str, ranks: int, options: argparse.Namespace) -> dict[str, float]:
    """What a variant printed; nothing where it failed, which is said on stderr."""
    command = [sys.executable, str(HERE), "--variant", kind, strategy, str(ranks)]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    command += ["--elements", str(options.elements)]
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    environment = {**os.environ, **place, "MASTER_PORT": str(free_port())}
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=900)
    with contextlib.suppress(IndexError, json.JSONDecodeError):
        if run.returncode == 0:
            found: dict[str, float] = json.loads(run.stdout.splitlines()[-1])
            return found
    print(f"{kind} of {strategy} with {ranks} ranks failed ({run.returncode})", file=sys.stderr)
    return {}


def of_rounds(kind: str, ranks: int, options: argparse.Namespace) -> dict[str, list[dict]]:
    """What each strategy gave, by round, in turn."""
    names = STRATEGIES if ranks == 1 else [name for name in STRATEGIES if name != "plain"]
    found: dict[str, list[dict]] = {name: [] for name in names}
    for _ in range(options.rounds):
        for name, given in found.items():
            given.append(measured(kind, name, ranks, options))
    return found


def spread(values: list[float | None], digits: int) -> str:
    """Median and range; "-" where there is nothing."""
    known = [value for value in values if value is not None]
    if not known:
        return "-"
    low, middle, high = min(known), statistics.median(known), max(known)
    return f"{middle:.{digits}f} ({low:.{digits}f}-{high:.{digits}f})"


def figures(found: list[dict], key: str, scale: float, less: float = 0.0) -> list[float | None]:
    return [(run[key] - less) * scale if key in run else None for run in found]


def table(title: str, head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return f"{title}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def kernel_table(options: argparse.Namespace) -> str:
    found = measured("kernels", "zero0", 1, options)
    copy = found.get("copy")
    rows = []
    for name, size in BYTES.items():
        seconds = found.get(name)
        if seconds is None or copy is None:
            rows.append([name, "-", "-", "-"])
            continue
        rate = size * options.elements / seconds
        share = rate / (BYTES["copy"] * options.elements / copy)
        rows.append([name, f"{seconds * 1e3:.3f}", f"{rate / 1e9:.0f}", f"{share:.2f}"])
    title = f"Kernels, {options.elements} elements, median of {options.rounds} rounds of 5 calls"
    return table(title, ["", "ms", "GB/s", "of a copy's rate"], rows)


def host_table(ranks: int, options: argparse.Namespace) -> str:
    found = of_rounds("host", ranks, options)
    plain = statistics.median(
        [run["host"] for run in found.get("plain", []) if "host" in run] or [0.0]
    )
    over = "over plain torch" if plain else "in all"
    rows = [
        [name, spread(figures(runs, "host", 1e6 / UNITS, plain), 1)]
        for name, runs in found.items()
        if name != "plain"
    ]
    title = f"Host time {over}, {UNITS} units of a Linear({TINY}, {TINY}), {_words(ranks)}"
    return table(title, ["", "us per unit and step"], rows)


def step_table(ranks: int, options: argparse.Namespace) -> str:
    rows = []
    for name, runs in of_rounds("step", ranks, options).items():
        same = all(run.get("same_peak", 0.0) for run in runs)
        rows.append(
            [
                name,
                spread(figures(runs, "step", 1e3), 2),
                spread(figures(runs, "peak", 2**-20), 0),
                "yes" if same else "no",
                spread(figures(runs, "held", 2**-20), 0),
            ]
        )
    title = (
        f"A GPT of {DEPTH} blocks of width {WIDTH}, {BATCH} x {CONTEXT} tokens, bf16 autocast, "
        f"{_words(ranks)}"
    )
    return table(title, ["", "ms a step", "peak MiB", "same in each step", "held MiB"], rows)


def _words(ranks: int) -> str:
    return "one rank over NCCL" if ranks == 1 else f'rank 0 of a "fake" group of {ranks}'


def heading(date: str) -> str:
    device = torch.cuda.get_device_properties(0)
    version = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    )
    return (
        f"# Benchmarks on a GPU, {date}\n\n{device.name}, {device.total_memory / 2**30:.0f} GiB, "
        f"sm_{device.major}{device.minor}; torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"Zero at {version.stdout.strip() or 'unknown'}. `python benchmarks/gpu.py`\n"
    )


def main() -> None:
    date = datetime.date.today().isoformat()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--elements", type=int, default=2**28)
    folder = HERE.parent / "results" / f"{date}-gpu"
    parser.add_argument("--page", type=Path, default=folder)
    parser.add_argument("--variant", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        reason = "no CUDA device" if torch.version.cuda else "torch has no CUDA"
        print(f"nothing was measured: {reason}")
        return
    if options.variant:
        run_variant(options)
        return
    parts = [heading(date), kernel_table(options)]
    for ranks in (1, FAKE_RANKS):
        parts += [host_table(ranks, options), step_table(ranks, options)]
    text = "\n".join(parts)
    print(text)
    options.page.mkdir(parents=True, exist_ok=True)
    (options.page / "README.md").write_text(text)


if __name__ == "__main__":
    main()
