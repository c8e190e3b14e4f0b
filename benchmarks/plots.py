"""Plots that benchmarks share. SVG, without dates or random names, so that equal figures give equal
files."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

BLUE, PALE_BLUE, ORANGE, GREY = "#2f6db5", "#9dbfe3", "#e07b39", "#b9c0c8"
_LINES = [BLUE, ORANGE, "#4a9a6a", "#8a5aa8", "#c04b4b", "#50565e", PALE_BLUE, "#c9a227"]


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "zero"
    from matplotlib import pyplot as plt

    return plt


def save(figure: Any, path: Path) -> None:
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    pyplot().close(figure)


def color_of(name: str) -> str:
    if name.startswith("zero") and name[4:5].isdigit():
        return PALE_BLUE if name.endswith("_group") else BLUE
    return GREY if name.startswith(("plain", "bound", "concurrent", "theory")) else ORANGE


def tidy(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    axes.grid(axis="both", color="#e6e8eb")


def bars(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[float]]],
    label: str,
    line: float | None = None,
) -> None:
    """A panel for each title, a bar for each name: its median, and a line over its range."""
    plt = pyplot()
    rows = max(len(values) for values in panels.values())
    figure, axes_row = plt.subplots(
        1,
        len(panels),
        figsize=(6.5 * len(panels), 1.2 + 0.27 * rows),
        layout="constrained",
        squeeze=False,
    )
    for axes, (title, values) in zip(axes_row[0], panels.items(), strict=True):
        for row, (name, numbers) in enumerate(values.items()):
            middle = statistics.median(numbers)
            error = [[middle - min(numbers)], [max(numbers) - middle]]
            axes.barh(
                row, middle, 0.7, xerr=error, color=color_of(name), error_kw={"elinewidth": 0.8}
            )
        axes.set_yticks(range(len(values)), list(values), fontsize=8)
        axes.invert_yaxis()
        tidy(axes)
        if line is not None:
            axes.axvline(line, color="#50565e", linewidth=0.8)
        axes.set_xlabel(label, fontsize=9)
        axes.set_title(title, fontsize=10)
    save(figure, path)


def lines(
    path: Path,
    panels: Mapping[str, Mapping[str, Sequence[tuple[float, float]]]],
    x_label: str,
    y_label: str,
    logarithmic: bool = True,
) -> None:
    """A panel for each title, a line through the points of each name."""
    plt = pyplot()
    figure, axes_row = plt.subplots(
        1, len(panels), figsize=(6.5 * len(panels), 4.2), layout="constrained", squeeze=False
    )
    for axes, (title, series) in zip(axes_row[0], panels.items(), strict=True):
        for index, (name, points) in enumerate(series.items()):
            xs, ys = [point[0] for point in points], [point[1] for point in points]
            axes.plot(xs, ys, marker="o", label=name, color=_LINES[index % len(_LINES)])
        if logarithmic:
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
        ticks = sorted({point[0] for points in series.values() for point in points})
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        tidy(axes)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)
        axes.set_title(title, fontsize=10)
        axes.legend(frameon=False, fontsize=8)
    save(figure, path)
