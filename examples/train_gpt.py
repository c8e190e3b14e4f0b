"""Trains a small GPT on the sources of the Python standard library, sharded by Zero.

torchrun --nproc-per-node 2 examples/train_gpt.py --stage 3
python examples/train_gpt.py                                   (one rank)

A run saves checkpoints below --out and, started again, goes on from the newest to the same weights,
bit for bit, as one that was never stopped. examples/train_gpt.cpp is the same run in C++.
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
from resume import (
    History,
    Standing,
    after_the_end,
    changes,
    describe,
    differences,
    is_finished,
    latest_of,
    refusal,
    standing_of,
)
from text import Batches, default_directory, read_directory
from tqdm import tqdm

import zero_torch as zero

PROMPT = b"class Reader:\n    def read(self"


def parse_flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--stage", type=int, default=3, help="ZeRO stage")
    add("--device", default="auto", choices=["auto", "cpu", "cuda"], help="auto: a GPU if seen")
    add("--steps", type=int, default=500)
    add("--batch", type=int, default=4, help="sequences of a micro-batch, per rank")
    add("--accumulate", type=int, default=1, help="micro-batches of a step")
    add("--sync-every-micro", action="store_true", help="reduce after each micro-batch")
    add("--context", type=int, default=128, help="bytes of a sequence")
    add("--layers", type=int, default=6)
    add("--dim", type=int, default=256)
    add("--heads", type=int, default=4)
    add("--lr", type=float, default=2e-3, help="highest learning rate")
    add("--min-lr", type=float, default=2e-4, help="learning rate after the decay")
    add("--decay-steps", type=int, default=0, help="steps down to --min-lr; 0: the first --steps")
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
    add("--out", type=Path, default=Path("runs/train_gpt"), help="results; a run here goes on")
    add("--fresh", action="store_true", help="start over: delete the checkpoints below --out")
    add("--save-every", type=int, default=100, help="steps between checkpoints; 0: only the last")
    add("--keep-last", type=int, default=2, help="checkpoints that are kept")
    add("--log-losses", type=Path, help="file for each step's exact loss")
    add("--no-plot", action="store_true", help="write no picture")
    return parser.parse_args()


def lr_factor(args: argparse.Namespace, step: int) -> float:
    """Linear warm-up, then half a cosine down to --min-lr, which stays. A function of the step, as
    the batches are: nothing of it has to be saved."""
    if step < args.warmup:
        return (step + 1) / args.warmup
    progress = min(1.0, (step - args.warmup) / max(1, args.decay_steps - args.warmup))
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

    def __init__(self, first: int, steps: int, tokens_per_step: int, rank: int):
        self.first, self.steps, self.tokens, self.rank = first, steps, tokens_per_step, rank
        self.seconds = 0.0
        bar = rank == 0 and sys.stderr.isatty()
        self.bar = (
            tqdm(total=steps, initial=first, unit="step", dynamic_ncols=True) if bar else None
        )

    def say(self, line: str) -> None:
        if self.bar is not None:
            self.bar.write(line)
        elif self.rank == 0:
            print(line, flush=True)

    def step(self, done: int, loss: float, seconds: float) -> None:
        self.seconds += seconds
        each = self.seconds / (done - self.first)
        rate = self.tokens / each
        if self.bar is not None:
            self.bar.set_postfix_str(f"loss {loss:.4f}, {rate:,.0f} tokens/s", refresh=False)
            self.bar.update()
        elif done % max(1, self.steps // 20) == 0:
            left = round(each * (self.steps - done))
            self.say(
                f"step {done:5d}/{self.steps}  loss {loss:.4f}  {rate:.0f} tokens/s  "
                f"{left // 60:02d}:{left % 60:02d} left"
            )

    def close(self) -> None:
        if self.bar is not None:
            self.bar.close()


def take_step(
    args: argparse.Namespace, model: GPT, opt: zero.ZeroOptimizer, batches: Batches, step: int
) -> tuple[float, dict | None]:
    """The mean loss, and in the last step the report while gradients are held."""
    total, report = 0.0, None
    for micro in range(args.accumulate):
        synced = args.sync_every_micro or micro == args.accumulate - 1
        with nullcontext() if synced else opt.no_sync():
            loss = loss_of(model, batches.train(step, micro))
            (loss / args.accumulate).backward()
        total += loss.item()
    if step == args.steps - 1:
        report = zero.report(opt).as_dict()
    opt.clip_grad_norm_(args.clip)
    for group in opt.param_groups:
        group["lr"] = args.lr * lr_factor(args, step)
    opt.step()
    opt.zero_grad()
    return mean_over_ranks(total / args.accumulate), report


def train(
    args: argparse.Namespace,
    model: GPT,
    opt: zero.ZeroOptimizer,
    batches: Batches,
    standing: Standing,
    history: History,
) -> None:
    """From where the run stands to its last step, which is saved."""
    tokens = args.batch * batches.ranks * args.accumulate * args.context
    progress = Progress(standing.step, args.steps, tokens, batches.rank)

    def check(step: int) -> None:
        history.add_validation(step, validate(model, batches, args.eval_batches))
        if history.validation:
            loss = history.validation[-1][1]
            progress.say(f"step {step:5d}/{args.steps}  validation loss {loss:.6f}")

    for step in range(standing.step, args.steps):
        if step % args.eval_every == 0:
            check(step)
        start = time.perf_counter()
        loss, report = take_step(args, model, opt, batches, step)
        seconds = time.perf_counter() - start
        history.add_loss(step, loss)
        standing.step, standing.seconds = step + 1, standing.seconds + seconds
        standing.tokens += tokens
        progress.step(step + 1, loss, seconds)
        if report is not None:
            standing.theory, standing.memory = gather_memory(report, batches.ranks)
        due = args.save_every > 0 and (step + 1) % args.save_every == 0
        if due or step + 1 == args.steps:
            history.flush()
            standing.save(args, model, opt)
    check(args.steps)
    progress.close()


def gather_memory(report: dict, ranks: int) -> tuple[dict, list[dict]]:
    """Theory, and what every rank holds."""
    reports = [report]
    if dist.is_initialized():
        reports = [None] * ranks
        dist.all_gather_object(reports, report)
    return report["theory"]["held"], [{key: r[key] for key in ("held", "peak")} for r in reports]


def write_results(args: argparse.Namespace, metrics: dict) -> None:
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


def stop(line: str, code: int) -> None:
    """Ends the program on all ranks."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(line, file=sys.stderr if code else sys.stdout, flush=True)
    if dist.is_initialized():
        dist.barrier()  # a launcher ends all ranks when one ends: not before it is said
    sys.exit(code)


def go_on(
    args: argparse.Namespace, text: bytes, rank: int, ranks: int
) -> tuple[Path | None, Standing]:
    """The checkpoint to load, and where the run stands. Ends the program where nothing is left to
    do, or where it is another run."""
    checkpoint = latest_of(args)
    standing = Standing() if checkpoint is None else standing_of(checkpoint)
    saved = standing.configuration
    args.decay_steps = args.decay_steps or saved.get("decay_steps", args.steps)
    standing.configuration = now = describe(args, text, ranks)
    if checkpoint is None:
        return None, standing
    if different := differences(saved, now):
        stop(refusal(checkpoint, different), 1)
    if is_finished(args, standing.step):
        stop(f"finished {checkpoint}: {after_the_end(args, standing.step)}", 0)
    lines = [f"resumed  {checkpoint}", *(f"note     {line}" for line in changes(saved, now))]
    if args.steps > standing.step >= args.decay_steps:
        lines.append(f"note     the decay is over: the learning rate stays at {args.min_lr}")
    if rank == 0:
        print(*lines, sep="\n")
    return checkpoint, standing


def device_of(args: argparse.Namespace) -> torch.device:
    """What --device says. zero.init() has chosen this rank's GPU."""
    available = torch.cuda.is_available()
    if args.device == "cuda" and not available:
        sys.exit("--device cuda: torch sees no GPU; --device cpu runs without")
    return torch.device("cuda" if available and args.device != "cpu" else "cpu")


def build(args: argparse.Namespace, device: torch.device) -> tuple[GPT, zero.ZeroOptimizer]:
    model = GPT(args.layers, args.dim, args.heads, args.context)
    initialise(model, args.seed)
    model.to(device)
    opt = zero.ZeroOptimizer(
        model,
        stage=args.stage,
        lr=args.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        bucket_bytes=int(args.bucket_mb * 2**20),
    )
    return model, opt


def main() -> None:
    args = parse_flags()
    zero.init()
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    device = device_of(args)

    text = (
        args.text.read_bytes()[: args.max_bytes]
        if args.text
        else read_directory(args.text_dir, args.max_bytes)
    )
    history = History(args, rank)
    if dist.is_initialized():
        dist.barrier()
    checkpoint, standing = go_on(args, text, rank, ranks)
    history.begin(args, standing.step)
    batches = Batches(text, args.batch, args.context, args.seed, rank, ranks, device)
    model, opt = build(args, device)

    parameters = sum(p.numel() for p in model.parameters())
    effective = args.batch * ranks * args.accumulate
    if rank == 0:
        print(f"text     {len(text)} bytes of {args.text or args.text_dir}")
        print(f"model    {args.layers} x {args.dim}, {parameters} parameters")
        print(
            f"batch    {effective} sequences of {args.context} bytes = {args.batch} per rank x "
            f"{ranks} ranks x {args.accumulate} accumulated; ZeRO stage {args.stage} on {device}",
            flush=True,
        )

    if checkpoint is not None:
        zero.load(checkpoint, model, opt)
    train(args, model, opt, batches, standing, history)
    with zero.gathered(model):  # once for all tokens, instead of for each
        sample = generate(model, PROMPT, args.sample_bytes, args.seed)
    if rank == 0:
        print(f"\n{zero.report(opt)}")
        print(f"sample   ({args.sample_bytes} bytes)\n{printable(sample)}\n")
        rate = standing.tokens / standing.seconds
        print(f"speed    {rate:.0f} tokens/s; {standing.seconds:.1f} s of training")
        metrics = {
            "stage": args.stage,
            "ranks": ranks,
            "parameters": parameters,
            "effective_batch": effective,
            "losses": history.losses,
            "validation": history.validation,
            "seconds": standing.seconds,
            "tokens_per_second": rate,
            "memory": standing.memory,
            "theory": standing.theory,
        }
        write_results(args, metrics)


if __name__ == "__main__":
    main()
