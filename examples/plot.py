"""Draws what a training run recorded: python plot.py METRICS.json [PICTURE.png]"""

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt
from matplotlib.patches import Patch

KINDS = ("parameters", "gradients", "optimizer_state", "buffers")
BLUE, ORANGE, GREY = "#2f6db5", "#e07b39", "#b9c0c8"
RANKS_SHOWN = 4


def smoothed(values: list[float], keep: float = 0.95) -> list[float]:
    """An exponential mean without the lag of its start."""
    means, total, weight = [], 0.0, 0.0
    for value in values:
        total = keep * total + value
        weight = keep * weight + 1
        means.append(total / weight)
    return means


def draw_losses(axes: plt.Axes, metrics: dict) -> None:
    losses = metrics["losses"]
    steps = range(1, len(losses) + 1)
    axes.plot(steps, losses, color=BLUE, alpha=0.3, linewidth=1, label="training")
    axes.plot(steps, smoothed(losses), color=BLUE, linewidth=2, label="training, smoothed")
    axes.plot(
        *zip(*metrics["validation"], strict=True),
        color=ORANGE,
        marker="o",
        markersize=5,
        linewidth=1.2,
        label="validation",
    )
    axes.set_xlabel("step")
    axes.set_ylabel("loss (nats per byte)")
    axes.grid(color="#e6e8eb")
    axes.legend(frameon=False)


def draw_memory(axes: plt.Axes, metrics: dict) -> None:
    """For each kind: theory, then a bar a rank, solid up to what is held, pale up to the peak."""
    ranks = metrics["memory"][:RANKS_SHOWN]
    height = 0.8 / (len(ranks) + 1)
    widest = 0.0
    for row, kind in enumerate(KINDS):
        bars = [(metrics["theory"].get(kind, 0), None)]
        bars += [(rank["held"][kind], rank["peak"][kind]) for rank in ranks]
        for column, (held, peak) in enumerate(bars):
            y = row + (column - (len(bars) - 1) / 2) * height
            held_mib, peak_mib = held / 2**20, (peak or held) / 2**20
            color = GREY if peak is None else BLUE
            axes.barh(y, peak_mib, height * 0.9, color=color, alpha=0.35)
            axes.barh(y, held_mib, height * 0.9, color=color)
            label = f"{held_mib:.1f}"
            if peak is not None and peak_mib - held_mib >= 0.05:
                label += f", peak {peak_mib:.1f}"
            axes.annotate(
                label, (peak_mib, y), (4, 0), textcoords="offset points", va="center", fontsize=8
            )
            widest = max(widest, peak_mib)
    axes.set_yticks(range(len(KINDS)), [kind.replace("_", " ") for kind in KINDS])
    axes.invert_yaxis()
    axes.set_xlim(0, 1.3 * widest)
    axes.set_xlabel("MiB per rank, before the optimizer's step")
    axes.grid(axis="x", color="#e6e8eb")
    shown = f"ranks 0-{len(ranks) - 1}" if len(ranks) > 1 else "rank 0"
    handles = [
        Patch(color=GREY, label="theory"),
        Patch(color=BLUE, label=f"held, {shown}"),
        Patch(color=BLUE, alpha=0.35, label="peak of the step"),
    ]
    axes.legend(handles=handles, frameon=False, loc="lower right")


def draw(metrics: dict, path: Path) -> None:
    figure, (left, right) = plt.subplots(1, 2, figsize=(13, 5), layout="constrained")
    figure.suptitle(
        f"GPT with {metrics['parameters'] / 1e6:.1f} M parameters, ZeRO stage {metrics['stage']}, "
        f"{metrics['ranks']} rank{'s' * (metrics['ranks'] > 1)}",
        fontsize=13,
    )
    draw_losses(left, metrics)
    draw_memory(right, metrics)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
        axes.set_axisbelow(True)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def main() -> None:
    if len(sys.argv) not in (2, 3):
        sys.exit(__doc__)
    source = Path(sys.argv[1])
    target = Path(sys.argv[2]) if len(sys.argv) == 3 else source.with_name("training.png")
    draw(json.loads(source.read_text()), target)
    print(target)


if __name__ == "__main__":
    main()
