"""What a training step should take: collectives as latency plus bytes over bandwidth, computation
that may hide them, and the traffic of each stage.

    python benchmarks/scaling_model.py [--results DIR] [--tasks small large]

Prints what the model says of steps that were published (published_steps.py), and of the steps and
collectives that steps.py and collectives.py measured into the folder of results: the collectives
are fitted by size, and nothing of the steps but the computation of a rank (`concurrent`) is used.

A collective of S bytes on N ranks takes alpha + beta * S * (N-1)/N, an all-reduce that of a
reduce-scatter and an all-gather. Computation and network are one queue each. At stage 3 a unit's
gather starts when the unit before the last one is done (two are whole at a time), its gradients
leave when they are there. Not in it: stragglers, memory pressure, what a transfer takes of the
processor while it is hidden. Where ranks compute on the cores that also copy, nothing is hidden
(``overlap=False``).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Result, parser_of, read_result


@dataclass(frozen=True)
class Link:
    """Seconds of a collective: ``alpha`` a call, ``beta`` a byte that a rank sends."""

    alpha: float
    beta: float

    def seconds(self, size: float, ranks: int) -> float:
        """Of a reduce-scatter or all-gather of ``size`` bytes in all."""
        return self.alpha + self.beta * size * (ranks - 1) / ranks if ranks > 1 else 0.0


def ring(ranks: int, ranks_per_node: int, hop: float, node_hop: float, bandwidth: float) -> Link:
    """A ring through all nodes: ``hop`` seconds to the next rank of a node, ``node_hop`` to the
    next node; ``bandwidth`` in bytes a second that each rank sends."""
    nodes = -(-ranks // ranks_per_node)
    between = nodes - 1 if nodes > 1 else 0
    return Link((ranks - 1 - between) * hop + between * node_hop, 1 / bandwidth)


def fitted(points: Sequence[tuple[float, float]], ranks: int) -> Link:
    """The link with the least relative squares over (bytes in all, seconds); neither of its
    numbers is negative."""
    rows = [(1 / t, s * (ranks - 1) / ranks / t) for s, t in points]
    aa, ab = sum(a * a for a, _ in rows), sum(a * b for a, b in rows)
    bb, a1, b1 = sum(b * b for _, b in rows), sum(a for a, _ in rows), sum(b for _, b in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        alpha, beta = (a1 * bb - b1 * ab) / determinant, (aa * b1 - ab * a1) / determinant
        if alpha >= 0 and beta >= 0:
            return Link(alpha, beta)
    alone_alpha, alone_beta = Link(a1 / aa, 0.0), Link(0.0, b1 / bb)
    errors = [
        sum((link.alpha * a + link.beta * b - 1) ** 2 for a, b in rows)
        for link in (alone_alpha, alone_beta)
    ]
    return alone_alpha if errors[0] < errors[1] else alone_beta


@dataclass(frozen=True)
class Unit:
    """What is gathered, reduced and computed together: seconds, and bytes as they travel."""

    forward: float
    backward: float
    gathered: float  # bytes of the whole unit's weights
    reduced: float  # bytes of its gradient


@dataclass(frozen=True)
class Cluster:
    ranks: int
    gather: Link
    reduce: Link
    overlap: bool = True


def traffic(stage: int, gathered: float, reduced: float, ranks: int) -> float:
    """Bytes that a rank sends in a step with one micro-batch."""
    share = (ranks - 1) / ranks
    gathers = 2 if stage == 3 else 1
    return share * (reduced + gathers * gathered)


def step_seconds(stage: int, units: Sequence[Unit], cluster: Cluster, optimizer: float) -> float:
    """Of one step; ``optimizer``: seconds to update all parameters, of which stages 1 to 3 leave a
    rank its part."""
    own = optimizer if stage == 0 else optimizer / cluster.ranks
    if not cluster.overlap:
        compute = sum(unit.forward + unit.backward for unit in units)
        return compute + own + communication(stage, units, cluster)
    return _stage3(units, cluster) + own if stage == 3 else _replicated(units, cluster) + own


def communication(stage: int, units: Sequence[Unit], cluster: Cluster) -> float:
    """Seconds of all collectives, one after the other."""
    gathers = 2 if stage == 3 else 1
    return sum(
        gathers * cluster.gather.seconds(unit.gathered, cluster.ranks)
        + cluster.reduce.seconds(unit.reduced, cluster.ranks)
        for unit in units
    )


def _stage3(units: Sequence[Unit], cluster: Cluster) -> float:
    compute = network = 0.0
    done = [0.0, 0.0]  # when the last two units were done: the third may be gathered
    passes = [(unit, unit.forward, False) for unit in units]
    passes += [(unit, unit.backward, True) for unit in reversed(units)]
    leaving: list[tuple[float, float]] = []  # (ready, seconds) of gradients not yet on their way
    for unit, seconds, backward in passes:
        begin = done[-2]
        while leaving and leaving[0][0] <= max(network, begin):  # those that were ready earlier
            ready, takes = leaving.pop(0)
            network = max(network, ready) + takes
        network = max(network, begin) + cluster.gather.seconds(unit.gathered, cluster.ranks)
        compute = max(compute, network) + seconds
        done.append(compute)
        if backward:
            leaving.append((compute, cluster.reduce.seconds(unit.reduced, cluster.ranks)))
    for ready, takes in leaving:
        network = max(network, ready) + takes
    return max(compute, network)


def _replicated(units: Sequence[Unit], cluster: Cluster) -> float:
    """Stages 0 to 2 in a steady state: the all-gather travels during the next forward."""
    gathers = [cluster.gather.seconds(unit.gathered, cluster.ranks) for unit in units]
    compute = network = 0.0
    for unit, takes in zip(units, gathers, strict=True):
        network += takes
        compute = max(compute, network) + unit.forward
    for unit in reversed(units):
        compute += unit.backward
        network = max(network, compute) + cluster.reduce.seconds(unit.reduced, cluster.ranks)
    return max(compute, network)


# ---- steps that were measured here ----


def links_of(collectives: dict[str, Any], ranks: int, way: str) -> Cluster | None:
    """Fitted to the fp32 collectives of so many ranks, one ``way`` ("host", "group" or "gloo")."""
    for run in collectives["data"]["runs"]:
        if run["ranks"] != ranks:
            continue
        links = []
        for kind in ("all_gather", "reduce_scatter"):
            points = [
                (case["bytes"], statistics.median(case["seconds"][way]))
                for case in run["cases"]
                if case["collective"] == kind and case["dtype"] == "Float"
            ]
            links.append(fitted(points, ranks))
        return Cluster(ranks, links[0], links[1], overlap=False)
    return None


def unit_bytes(task: str) -> list[int]:
    """Of each block of a task's model, then of what is left."""
    import torch
    from models import TASKS

    with torch.device("meta"):
        model = TASKS[task].make()
    blocks = [module for module in model.modules() if isinstance(module, TASKS[task].block)]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    return [*sizes, sum(p.nbytes for p in model.parameters()) - sum(sizes)]


def buckets(sizes: Sequence[int], first: int = 2**20, limit: int = 25 * 2**20) -> list[int]:
    """What stages 0 to 2 send: the whole in pieces of Zero's default sizes."""
    left, found = sum(sizes), []
    while left > 0:
        found.append(min(left, limit if found else first))
        left -= found[-1]
    return found


def predicted(stage: int, sizes: Sequence[int], round_: dict[str, Any], cluster: Cluster) -> float:
    """Seconds of a step from a round of steps.py: a rank's computation while all compute."""
    concurrent = round_["concurrent"]
    whole, first = statistics.median(concurrent["seconds"]), concurrent["forward_backward"]
    pieces = sizes if stage == 3 else buckets(sizes)
    share = first / 3 / len(pieces)  # backward takes twice as long as forward
    units = [Unit(share, 2 * share, piece, piece) for piece in pieces]
    return step_seconds(stage, units, cluster, whole - first)


def compare(
    steps: dict[str, Any], collectives: dict[str, Any], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Measured and predicted ratios to one plain process, of Zero's strategies."""
    rows = []
    ranks = steps["data"]["ranks"]
    for name, measured in steps["data"]["ratios"].items():
        if not name.startswith("zero") or not name[4:5].isdigit():
            continue
        cluster = links_of(collectives, ranks, "group" if name.endswith("_group") else "host")
        if cluster is None:
            continue
        ratios = [
            predicted(int(name[4]), sizes, found, cluster)
            / statistics.median(found["plain"]["seconds"])
            for found in steps["data"]["rounds"]
        ]
        found = {"measured": statistics.median(measured), "model": statistics.median(ratios)}
        rows.append({"strategy": name, **found, "error": found["model"] / found["measured"] - 1})
    return rows


def add_measured(result: Result, folder: Path) -> None:
    collectives = read_result(folder, "collectives")
    for path in sorted(folder.glob("steps-*.json")):
        steps = read_result(folder, path.stem)
        if collectives is None or steps is None:
            continue
        task = path.stem.removeprefix("steps-").split("-")[0]
        found = compare(steps, collectives, unit_bytes(task))
        result.data[path.stem] = found
        result.table(
            f"model-{path.stem}",
            f"The model by measured steps, {task}, {steps['data']['ranks']} ranks: ratio to one "
            "plain process",
            ["", "measured", "model", "error"],
            [
                [r["strategy"], f"{r['measured']:.3f}", f"{r['model']:.3f}", f"{r['error']:+.1%}"]
                for r in found
            ],
        )


def main() -> None:
    from published_steps import comparison

    parser = parser_of(__doc__)
    options = parser.parse_args()
    result = Result("scaling_model", options, timed=False)
    rows = comparison()
    result.table(
        "model-published",
        "The model by published steps of ZeRO-3 and FSDP2 (rows marked fit were used to fit)",
        ["", "unit", "published", "model", "error"],
        [
            [
                r.label,
                r.unit,
                f"{r.published:.0f}",
                f"{r.model:.0f}",
                "fit" if r.fit else f"{r.error:+.1%}",
            ]
            for r in rows
        ],
    )
    result.data["published"] = [vars(row) for row in rows]
    add_measured(result, options.results)
    result.write()


if __name__ == "__main__":
    main()
