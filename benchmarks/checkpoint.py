"""Saving and loading a GPT with AdamW's state, against plain writes and torch's own ways.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py [--model large|xl] [--rounds 3]

    zero        zero.save and zero.load at --stage (3), all ranks
    torch.save  rank 0 saves the whole state dicts of a replicated model, and flushes the file
    dcp         torch.distributed.checkpoint of a model under FSDP2, all ranks

Beside each save the same number of ranks writes the same bytes as plainly as it goes: blocks of
16 MiB out of one buffer, then fsync. "to plain" is the median over pairs of what that took by what
the save took: 1 is the disk's rate. Everything that is timed ends when the bytes are on the disk,
but for async_save's call, which ends when the shards are copied.
Loads read what was just written, out of the page cache. Extra memory is the growth of a rank's
resident memory over what it was before the call, at its peak, of the worst rank: mapped files that
it read count. Ways take turns; don't run anything else on the machine.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import plots
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import ROOT, run_ranks
from memory_use import reset_peak, status_mb
from models import GPT, Block
from results import Result, parser_of, spread
from strategies import wrap
from torch import nn

WAYS = ["zero", "torch.save", "dcp"]
MODELS = {
    "small": {"layers": 6, "dim": 256},  # 5.3 M parameters
    "large": {"layers": 8, "dim": 768},  # 58 M
    "xl": {"layers": 24, "dim": 1024},  # 304 M
}
VOCABULARY, CONTEXT = 1024, 64
BLOCK = 16 * 2**20
MB = 1e6

Call = Callable[[], object]


# ---- a rank ----


class Way:
    """A model with optimizer state, how it is saved, and how it is loaded."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        torch.manual_seed(0)
        model = GPT(VOCABULARY, options.dim, options.layers, CONTEXT)
        self.bytes = 3 * sum(p.nbytes for p in model.parameters())
        self.unit_bytes = sum(p.nbytes for p in model.blocks[0].parameters())
        self.name, self.path = name, options.folder / "saved"
        strategy = {"zero": f"zero{options.stage}", "torch.save": "ddp_fused", "dcp": "fsdp2"}[name]
        trainer = wrap(strategy, model, Block)
        self.model, self.opt = trainer.model, trainer.optimizer
        tokens = torch.randint(0, VOCABULARY, (1, 9))
        logits = self.model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        self.opt.step()
        self.opt.zero_grad()

    def save(self) -> None:
        if self.name == "zero":
            import zero_torch as zero

            zero.save(self.path, self.model, self.opt)
        elif self.name == "dcp":
            import torch.distributed.checkpoint as dcp

            dcp.save(self._sharded(), checkpoint_id=self.path)
        elif dist.get_rank() == 0:
            with self.path.open("wb") as file:
                torch.save([self.model.state_dict(), self.opt.state_dict()], file)
                file.flush()
                os.fsync(file.fileno())

    def begin_save(self) -> None:
        import zero_torch as zero

        self.pending = zero.async_save(self.path, self.model, self.opt)

    def loads(self) -> dict[str, Call]:
        if self.name == "zero":
            import zero_torch as zero

            return {
                "load": lambda: zero.load(self.path, self.model, self.opt),
                "load, unverified": lambda: zero.load(
                    self.path, self.model, self.opt, verify=False
                ),
            }
        return {"load": self._load_sharded if self.name == "dcp" else self._load_whole}

    def _load_whole(self) -> None:
        model, opt = torch.load(self.path)
        self.model.load_state_dict(model)
        self.opt.load_state_dict(opt)

    def _sharded(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "optimizer": opt}

    def _load_sharded(self) -> None:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._sharded()
        dcp.load(state, checkpoint_id=self.path)
        set_state_dict(
            self.model,
            self.opt,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )

    def remove(self) -> None:
        if dist.get_rank() == 0:
            if self.path.is_dir():
                shutil.rmtree(self.path)
            else:
                self.path.unlink(missing_ok=True)


class PlainWrite:
    """This rank's share of the bytes, from one buffer."""

    def __init__(self, folder: Path, share: int) -> None:
        self.path, self.share = folder / f"plain-{dist.get_rank()}", share
        self.block = os.urandom(BLOCK)

    def write(self) -> None:
        with self.path.open("wb", buffering=0) as file:
            for begin in range(0, self.share, BLOCK):
                file.write(memoryview(self.block)[: min(BLOCK, self.share - begin)])
            os.fsync(file.fileno())

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)


def timed(call: Call) -> tuple[float, float]:
    """(seconds from the first rank's beginning to the last one's end, MB of extra memory)."""
    dist.barrier()
    reset_peak()
    before = status_mb("VmRSS")
    began = time.perf_counter()
    call()
    dist.barrier()
    seconds = time.perf_counter() - began
    extra = torch.tensor([(status_mb("VmHWM") - before) * 1.024**2])
    dist.all_reduce(extra, dist.ReduceOp.MAX)
    return seconds, extra.item()


def settle(*removals: Call) -> None:
    """Nothing of what was written before is left to be done."""
    dist.barrier()
    for remove in removals:
        remove()
    os.sync()
    dist.barrier()


def run_rank(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank, world_size=world)
    nn.Linear(8, 8)(torch.randn(2, 8)).sum().backward()
    way = Way(options.way, options)
    plain = PlainWrite(options.folder, way.bytes // world)
    seconds: dict[str, list[float]] = {}
    extra: dict[str, float] = {}

    def measure_call(repeat: int, what: str, call: Call) -> None:
        took, grown = timed(call)
        if repeat >= 0:  # the first is not counted
            seconds.setdefault(what, []).append(took)
            extra[what] = max(extra.get(what, 0.0), grown)

    for repeat in range(-1, options.repeats):
        pair = [("plain", plain.write), ("save", way.save)]
        settle(plain.remove, way.remove)
        for what, call in pair if repeat % 2 else reversed(pair):
            measure_call(repeat, what, call)
            settle()
        if way.name == "zero":
            measure_call(repeat, "async_save's call", way.begin_save)
            way.pending.wait()
            settle()
        for what, call in way.loads().items():
            measure_call(repeat, what, call)
    settle(plain.remove, way.remove)
    if rank == 0:
        result = {"seconds": seconds, "extra_mb": extra, "bytes": way.bytes}
        print(json.dumps(result | {"unit_bytes": way.unit_bytes}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


# ---- all of them ----


def measure(way: str, options: argparse.Namespace, folder: str) -> dict[str, Any]:
    command = [sys.executable, __file__, "--way", way, "--folder", folder]
    for name, value in MODELS[options.model].items():
        command += [f"--{name}", str(value)]
    command += ["--repeats", str(options.repeats), "--stage", str(options.stage)]
    found: dict[str, Any] = run_ranks(command, options.ranks, 1800)
    return found


def joined(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The runs of one way as one, with figures."""
    whole = {**runs[0]}
    whole["seconds"] = {
        what: [took for run in runs for took in run["seconds"][what]] for what in whole["seconds"]
    }
    whole["extra_mb"] = {
        what: max(run["extra_mb"][what] for run in runs) for what in whole["extra_mb"]
    }
    whole["mb_per_second"] = {
        what: {
            "median": whole["bytes"] / MB / statistics.median(times),
            "min": whole["bytes"] / MB / max(times),
            "max": whole["bytes"] / MB / min(times),
        }
        for what, times in whole["seconds"].items()
    }
    pairs = zip(whole["seconds"]["plain"], whole["seconds"]["save"], strict=True)
    whole["save_to_plain"] = statistics.median(plain / save for plain, save in pairs)
    return whole


def add_table(result: Result, results: dict[str, dict[str, Any]], title: str) -> None:
    rows = []
    for way, found in results.items():
        for what, seconds in found["seconds"].items():
            rates = [found["bytes"] / MB / took for took in seconds]
            ratio = f"{found['save_to_plain']:.2f}" if what == "save" else ""
            extra = f"{found['extra_mb'][what]:.1f}"
            rows.append([f"{way}, {what}", spread(rates, 0), ratio, extra])
    result.table(
        result.name, f"Checkpoints, {title}", ["", "MB/s", "to plain writes", "extra MB"], rows
    )


def parse() -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", choices=MODELS, default="large")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--stage", type=int, default=3, help="of zero")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3, help="starts of each way")
    parser.add_argument("--repeats", type=int, default=3, help="saves of a start that count")
    parser.add_argument(
        "--parent", type=Path, default=ROOT / "build", help="on the disk to measure"
    )
    parser.add_argument("--way", choices=WAYS, help="this is a rank of it")
    parser.add_argument("--folder", type=Path, help="of a rank")
    parser.add_argument("--layers", type=int, help="of a rank")
    parser.add_argument("--dim", type=int, help="of a rank")
    options = parser.parse_args()
    if options.quick:
        options.model, options.rounds, options.repeats = "small", 1, 1
    return options


def main() -> None:
    options = parse()
    if options.way:
        run_rank(options)
        return
    result = Result(f"checkpoint-{options.model}", options)
    with tempfile.TemporaryDirectory(dir=options.parent, prefix="checkpoint-") as folder:

        def run(_: int) -> dict[str, Any]:
            return {way: measure(way, options, folder) for way in options.ways}

        rounds = result.rounds(options.rounds, run)
    results = {way: joined([found[way] for found in rounds]) for way in options.ways}
    first = next(iter(results.values()))
    title = (
        f"{first['bytes'] / MB:.0f} MB of parameters and moments, {options.ranks} ranks, zero at "
        f"stage {options.stage}; a unit has {first['unit_bytes'] / MB:.0f} MB"
    )
    add_table(result, results, title)
    result.data = results
    rates = {
        f"{way}, {what}": [found["bytes"] / MB / took for took in seconds]
        for way, found in results.items()
        for what, seconds in found["seconds"].items()
    }
    plots.bars(result.plot, {"checkpoints": rates}, "MB/s")
    result.write()


if __name__ == "__main__":
    main()
