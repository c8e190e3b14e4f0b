"""Trains a small GPT on the sources of the Python standard library, sharded by Zero.

torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3
python examples/train_gpt.py                                   (one rank)

examples/train_gpt.cpp is the same run in C++.
"""

import argparse
import json
import math
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from gpt import GPT, generate, initialise
from text import Batches, default_directory, read_directory
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import zero_torch as zero

PROMPT = b"class Reader:\n    def read(self"


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--stage", type=int, default=3, help="ZeRO stage")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=4, help="sequences of a micro-batch, per rank")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--sync-every-micro", action="store_true", help="reduce after each micro-batch")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--min-lr", type=float, default=2e-4, help="learning rate of the last step")
    add("--warmup", type=int, default=40, help="steps of linear warm-up")
    add("--clip", type=float, default=1.0, help="largest gradient norm")
    add("--bucket-mb", type=float, default=2.0, help="MiB of gradients reduced together")
    add("--seed", type=int, default=1)
    add("--text", type=Path, help="file to train on")
    add("--text-dir", type=Path, default=default_directory(), help="or all *.py files under this")
    add("--max-bytes", type=int, default=10_000_000, help="at most so much text")
    add("--eval-every", type=int, default=50, help="steps between validations")
    add("--eval-batches", type=int, default=16, help="batches of a validation, over all ranks")
    add("--sample-bytes", type=int, default=400, help="length of the text generated at the end")
    add("--out", type=Path, default=Path("runs/train_gpt"), help="directory for results")
    add("--log-losses", type=Path, help="file for each step's exact loss")
    add("--no-plot", action="store_true", help="write no picture")
    return parser.parse_args()


def lr_factor(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then half a cosine down to --min-lr."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = (step - args.warmup) / max(1, args.steps - args.warmup)
    floor = args.min_lr / args.lr
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def mean_over_ranks(value: float) -> float:
    """Added in the order of the ranks, so that every rank has the same bits."""
    if not dist.is_initialized():
        return value
    mine = torch.tensor([value], dtype=torch.float64)
    values = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(values, mine)
    total = 0.0
    for each in values:
        total += each.item()
    return total / len(values)


def loss_of(model: GPT, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    x, y = batch
    return F.cross_entropy(model(x).flatten(0, 1), y.flatten())


@torch.no_grad()
def validate(model: GPT, batches: Batches, eval_batches: int) -> float:
    each = math.ceil(eval_batches / batches.ranks)
    total = 0.0
    for number in range(each):
        total += loss_of(model, batches.validation(number)).item()
    return mean_over_ranks(total / each)


class Progress:
    """A bar on a terminal, else a line every twentieth of the run; rank 0 only."""

    def __init__(self, steps: int, tokens_per_step: int, rank: int):
        self.steps, self.tokens, self.rank = steps, tokens_per_step, rank
        self.seconds = 0.0
        bar = rank == 0 and sys.stderr.isatty()
        self.bar = tqdm(total=steps, unit="step", dynamic_ncols=True) if bar else None

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        elif self.rank == 0:
            print(line, flush=True)

    def step(self, done: int, loss: float, seconds: float) -> None:
        self.seconds += seconds
        rate = self.tokens * done / self.seconds
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif done % max(1, self.steps // 20) == 0:
            left = round(self.seconds / done * (self.steps - done))
            self.say(
                f"step {done:5d}/{self.steps}  loss {loss:.4f}  {rate:.0f} tokens/s  "
                f"{left // 60:02d}:{left % 60:02d} left"
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def train(args: argparse.Namespace, model: GPT, opt: zero.ZeroOptimizer, batches: Batches) -> dict:
    schedule = LambdaLR(opt, lambda step: lr_factor(args, step))
    tokens = args.batch * batches.ranks * args.accumulate * args.context
    progress = Progress(args.steps, tokens, batches.rank)
    losses, validation, memory = [], [], {}
    for step in range(args.steps):
        if step % args.eval_every == 0:
            validation.append((step, validate(model, batches, args.eval_batches)))
            progress.say(f"step {step:5d}/{args.steps}  validation loss {validation[-1][1]:.6f}")
        start = time.perf_counter()
        total = 0.0
        for micro in range(args.accumulate):
            synced = args.sync_every_micro or micro == args.accumulate - 1
            with nullcontext() if synced else opt.no_sync():
                loss = loss_of(model, batches.train(step, micro))
                (loss / args.accumulate).backward()
            total += loss.item()
        if step == args.steps - 1:
            memory = zero.report(opt).as_dict()  # while gradients are held
        opt.clip_grad_norm_(args.clip)
        opt.step()
        opt.zero_grad()
        schedule.step()
        losses.append(mean_over_ranks(total / args.accumulate))
        progress.step(step + 1, losses[-1], time.perf_counter() - start)
    validation.append((args.steps, validate(model, batches, args.eval_batches)))
    progress.close()
    progress.say(f"step {args.steps:5d}/{args.steps}  validation loss {validation[-1][1]:.6f}")
    return {
        "losses": losses,
        "validation": validation,
        "seconds": progress.seconds,
        "tokens_per_second": tokens * args.steps / progress.seconds,
        "memory": memory,
    }


def gather_memory(metrics: dict, ranks: int) -> None:
    """Replaces this rank's report by what every rank holds, and theory."""
    mine = metrics.pop("memory")
    reports = [mine]
    if dist.is_initialized():
        reports = [None] * ranks
        dist.all_gather_object(reports, mine)
    metrics["theory"] = mine["theory"]["held"]
    metrics["memory"] = [{key: report[key] for key in ("held", "peak")} for report in reports]


def write_results(args: argparse.Namespace, metrics: dict) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "metrics.json"
    path.write_text(json.dumps(metrics, indent=1) + "\n")
    print(f"metrics  {path}")
    if args.log_losses:
        lines = (f"{step} {loss.hex()}\n" for step, loss in enumerate(metrics["losses"]))
        args.log_losses.write_text("".join(lines))
        print(f"losses   {args.log_losses}")
    if not args.no_plot:
        from plot import draw

        draw(metrics, args.out / "training.png")
        print(f"picture  {args.out / 'training.png'}")


def printable(text: bytes) -> str:
    return "".join(chr(c) if 32 <= c < 127 or c in b"\n\t" else "?" for c in text)


def main() -> None:
    args = parse_flags()
    zero.init()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

    text = (
        args.text.read_bytes()[: args.max_bytes]
        if args.text
        else read_directory(args.text_dir, args.max_bytes)
    )
    batches = Batches(text, args.batch, args.context, args.seed, rank, ranks)
    model = GPT(args.layers, args.dim, args.heads, args.context)
    initialise(model, args.seed)
    opt = zero.ZeroOptimizer(
        model,
        stage=args.stage,
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        bucket_bytes=int(args.bucket_mb * 2**20),
    )

    parameters = sum(p.numel() for p in model.parameters())
    effective = args.batch * ranks * args.accumulate
    if rank == 0:
        print(f"text     {len(text)} bytes of {args.text or args.text_dir}")
        print(f"model    {args.layers} x {args.dim}, {parameters} parameters")
        print(
            f"batch    {effective} sequences of {args.context} bytes = {args.batch} per rank x "
            f"{ranks} ranks x {args.accumulate} accumulated; ZeRO stage {args.stage}",
            flush=True,
        )

    metrics = {"stage": args.stage, "ranks": ranks, "parameters": parameters}
    metrics["effective_batch"] = effective
    metrics |= train(args, model, opt, batches)
    gather_memory(metrics, ranks)
    with zero.gathered(model):  # once for all tokens, instead of for each
        sample = generate(model, PROMPT, args.sample_bytes, args.seed)
    if rank == 0:
        print(f"\n{zero.report(opt)}")
        print(f"sample   ({args.sample_bytes} bytes)\n{printable(sample)}\n")
        rate, seconds = metrics["tokens_per_second"], metrics["seconds"]
        print(f"speed    {rate:.0f} tokens/s; {seconds:.1f} s of training")
        write_results(args, metrics)


if __name__ == "__main__":
    main()
