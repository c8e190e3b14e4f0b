"""What a training step should take: collectives as latency plus bytes over bandwidth, computation
that may hide them, and the traffic of each stage.

    python benchmarks/scaling_model.py [--results DIR]

Prints what the model says of steps that were published (published_steps.py), and of the steps of
several ranks that steps.py measured into the folder of results. Of those it uses nothing that was
sent: the steps of Zero's ranks at once, each a group of its own (`zero0_alone` and so on). The rest
comes from collectives.py: what a collective takes alone, what beside computation, and by how much
it puts that off.

A collective of S bytes on N ranks takes alpha + beta * S * (N-1)/N, an all-reduce that of a
reduce-scatter and an all-gather. Computation and network are one queue each. At stage 3 a unit's
gather starts when the unit before it begins, its gradients leave when they are there; stages 1 and
2 gather during the next forward, bucket by bucket; every step ends with a message. Not in it:
stragglers, memory pressure, ranks that wait for each other's processor. What a rank copies of its
own unit at stage 3 is in both its step alone and its collectives, so it counts twice.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results import Result, parser_of, read_result
from strategies import ZERO, ZERO_GROUP, stage_of, transport_of


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
class Collective:
    """``alone``: while the rank waits. ``beside`` computation it takes that long and puts it off
    by ``taken``; without these it is hidden at no cost."""

    alone: Link
    beside: Link | None = None
    taken: Link = Link(0.0, 0.0)

    def transfer(self, size: float, ranks: int) -> Transfer:
        beside = (self.beside or self.alone).seconds(size, ranks)
        taken = min(self.taken.seconds(size, ranks), beside)
        return Transfer(self.alone.seconds(size, ranks), beside, taken)


@dataclass
class Transfer:
    """One collective on its way; ``left`` of 1."""

    alone: float
    beside: float
    taken: float
    left: float = 1.0


@dataclass(frozen=True)
class Cluster:
    ranks: int
    gather: Collective
    reduce: Collective
    message: float = 0.0  # seconds of what ranks tell each other after backward


class Timeline:
    """A rank that computes, and its collectives, one after the other."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[Transfer] = []

    def send(self, transfer: Transfer) -> Transfer:
        if transfer.alone > 0 or transfer.beside > 0:
            self._queue.append(transfer)
        return transfer

    def wait(self, transfer: Transfer) -> None:
        while any(queued is transfer for queued in self._queue):
            self._finish_first()

    def wait_all(self) -> None:
        while self._queue:
            self._finish_first()

    def _finish_first(self) -> None:
        first = self._queue.pop(0)
        self.now += first.left * first.alone

    def compute(self, seconds: float) -> None:
        while seconds > 0:
            if not self._queue:
                self.now += seconds
                return
            first = self._queue[0]
            whole = first.left * first.beside
            rate = 1 - first.taken / first.beside if first.beside > 0 else 1.0
            passes = whole if seconds >= whole * rate else seconds / rate
            seconds -= passes * rate
            self.now += passes
            if passes >= whole:
                self._queue.pop(0)
            else:
                first.left -= passes / first.beside


def traffic(stage: int, gathered: float, reduced: float, ranks: int) -> float:
    """Bytes that a rank sends in a step with one micro-batch."""
    share = (ranks - 1) / ranks
    gathers = 2 if stage == 3 else 1
    return share * (reduced + gathers * gathered)


def step_seconds(stage: int, units: Sequence[Unit], cluster: Cluster, optimizer: float) -> float:
    """Of one step in a steady state; ``units`` in the order of forward; ``optimizer``: seconds to
    update all parameters, of which stages 1 to 3 leave a rank its part."""
    run = Timeline()
    if stage == 3:
        _stage3(run, units, cluster)
    else:
        _replicated(run, stage, units, cluster)
    run.wait_all()
    own = optimizer if stage == 0 else optimizer / cluster.ranks
    return run.now + cluster.message + own


def _stage3(run: Timeline, units: Sequence[Unit], cluster: Cluster) -> None:
    passes = [(unit, unit.forward, False) for unit in units]
    passes += [(unit, unit.backward, True) for unit in reversed(units)]
    gathers = [cluster.gather.transfer(unit.gathered, cluster.ranks) for unit, _, _ in passes]
    run.send(gathers[0])
    for i, (unit, seconds, backward) in enumerate(passes):
        run.wait(gathers[i])
        if i + 1 < len(passes):
            run.send(gathers[i + 1])
        run.compute(seconds)
        if backward:
            run.send(cluster.reduce.transfer(unit.reduced, cluster.ranks))


def _replicated(run: Timeline, stage: int, units: Sequence[Unit], cluster: Cluster) -> None:
    def gather(unit: Unit) -> Transfer:
        return run.send(cluster.gather.transfer(unit.gathered, cluster.ranks))

    gathers = [gather(unit) for unit in units] if stage > 0 else []
    for i, unit in enumerate(units):
        if gathers:
            run.wait(gathers[i])
        run.compute(unit.forward)
    for unit in reversed(units):
        run.compute(unit.backward)
        run.send(cluster.reduce.transfer(unit.reduced, cluster.ranks))
        if stage == 0:
            gather(unit)


# ---- steps that were measured here ----


def links_of(collectives: dict[str, Any], ranks: int, way: str) -> Cluster | None:
    """Fitted to the fp32 collectives of so many ranks, one ``way`` ("host" or "group")."""
    for run in collectives["data"]["runs"]:
        if run["ranks"] != ranks:
            continue
        found = []
        for kind in ("all_gather", "reduce_scatter"):
            cases = [c for c in run["cases"] if c["collective"] == kind and "beside" in c]
            by_meaning = [
                [(c["bytes"], c["seconds"][way]) for c in cases],
                [(c["bytes"], c["beside"][way]["seconds"]) for c in cases],
                [(c["bytes"], c["beside"][way]["taken"]) for c in cases],
            ]
            links = [
                fitted([(size, statistics.mean(times)) for size, times in points], ranks)
                for points in by_meaning
            ]
            found.append(Collective(*links))
        tiny = [
            statistics.mean(c["seconds"][way])
            for c in run["cases"]
            if c["collective"] == "all_reduce" and c["bytes"] < 2**10
        ]
        return Cluster(ranks, *found, message=tiny[0])
    return None


def unit_bytes(task: str) -> list[int]:
    """Of what is in no block of a task's model, then of its blocks."""
    import torch
    from models import TASKS

    with torch.device("meta"):
        model = TASKS[task].make()
    blocks = [module for module in model.modules() if isinstance(module, TASKS[task].block)]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in blocks]
    return [sum(p.nbytes for p in model.parameters()) - sum(sizes), *sizes]


def buckets(sizes: Sequence[int], first: int = 2**20, limit: int = 25 * 2**20) -> list[int]:
    """What stages 0 to 2 send: the whole in pieces of Zero's default sizes, of which the last in
    forward is the first that backward completes."""
    left, found = sum(sizes), []
    while left > 0:
        found.append(min(left, limit if found else first))
        left -= found[-1]
    return found[::-1]


@dataclass(frozen=True)
class Computation:
    """Seconds of a rank's step without communication."""

    first: float  # forward and backward
    optimizer: float  # to update all parameters

    @staticmethod
    def of(run: dict[str, Any]) -> Computation:
        first = run["forward_backward"]
        return Computation(first, statistics.median(run["seconds"]) - first)


def predicted(stage: int, sizes: Sequence[int], own: Computation, cluster: Cluster) -> float:
    """Seconds of a step whose computation is all ranks' ``own`` at once."""
    pieces = sizes if stage == 3 else buckets(sizes)
    share = own.first / sum(pieces) / 3
    units = [  # backward takes twice as long as forward
        Unit(share * size, 2 * share * size, size, size) for size in pieces
    ]
    return step_seconds(stage, units, cluster, own.optimizer)


def compare(
    steps: dict[str, Any], collectives: dict[str, Any], sizes: Sequence[int]
) -> list[dict[str, Any]]:
    """Measured and predicted ratios to one plain process, of Zero's strategies."""
    rows = []
    ranks, rounds = steps["data"]["ranks"], steps["data"]["rounds"]
    for name, measured in steps["data"]["ratios"].items():
        stage = stage_of(name)
        alone = f"zero{stage}_alone"
        if stage is None or name not in ZERO + ZERO_GROUP or alone not in rounds[0]:
            continue
        way = "group" if transport_of(name) == "group" else "host"
        cluster = links_of(collectives, ranks, way)
        if cluster is None:
            continue
        ratios = [
            predicted(stage, sizes, Computation.of(found[alone]), cluster)
            / statistics.median(found["plain"]["seconds"])
            for found in rounds
        ]
        found = {
            "alone": statistics.median(steps["data"]["ratios"][alone]),
            "measured": statistics.median(measured),
            "model": statistics.median(ratios),
        }
        rows.append({"strategy": name, **found, "error": found["model"] / found["measured"] - 1})
    return rows


def add_measured(result: Result, folder: Path) -> None:
    collectives = read_result(folder, "collectives")
    for path in sorted(folder.glob("steps-*.json")):
        task = path.stem.removeprefix("steps-").split("-")[0]
        steps = read_result(folder, path.stem)
        if collectives is None or steps is None or steps["data"]["ranks"] == 1:
            continue
        found = compare(steps, collectives, unit_bytes(task))
        result.data[path.stem] = found
        result.table(
            f"model-{path.stem}",
            f"The model by measured steps, {task}, {steps['data']['ranks']} ranks: ratio to one "
            "plain process",
            ["", "alone", "measured", "model", "error"],
            [
                [r["strategy"]]
                + [f"{r[key]:.3f}" for key in ("alone", "measured", "model")]
                + [f"{r['error']:+.1%}"]
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
