"""What runs beside what, and that no step waits: one GPU, as rank 0 of eight that are not there."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from fake_group import layers, shard, use_fake_group
from ranks import run
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import zero_torch as zero

RANKS = 8
WARM = 3


@dataclass
class Span:
    name: str
    stream: int
    start: float
    end: float


def _spans(action: Callable[[], None]) -> list[Span]:
    """What the GPU did: kernels and copies, with their streams."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        action()
        torch.cuda.synchronize()
    return [
        Span(e.name, e.device_resource_id, e.time_range.start, e.time_range.end)
        for e in traced.events()
        if e.device_type == DeviceType.CUDA and not e.is_user_annotation
    ]


def _overlap(one: list[Span], other: list[Span]) -> float:
    """Microseconds in which both are at work; spans of one stream do not overlap."""
    return sum(max(0.0, min(a.end, b.end) - max(a.start, b.start)) for a in one for b in other)


def _apart(rank: int, world: int) -> None:
    use_fake_group(RANKS)
    x = torch.randn(2048, 2048, device="cuda")
    for stage in range(4):
        model = layers("cuda", depth=8)
        opt = shard(model, stage)

        def step(model=model, opt=opt) -> None:
            model(x).square().mean().backward()
            opt.step()
            opt.zero_grad()

        for _ in range(WARM):
            step()
        streams: dict[int, list[Span]] = defaultdict(list)
        for span in _spans(step):
            streams[span.stream].append(span)
        compute = max(streams, key=lambda s: sum(x.end - x.start for x in streams[s]))
        others = [span for stream, spans in streams.items() if stream != compute for span in spans]
        # A reduction a bucket; stage 3's gathers, one forward and one backward, are on a second.
        assert len(others) >= len(model), (stage, len(others))
        assert len(streams) >= (3 if stage == 3 else 2), (stage, sorted(streams))
        if stage > 0:
            assert any("emcpy" in span.name for span in others), stage
        shared = _overlap(others, streams[compute])
        busy = sum(span.end - span.start for span in others)
        assert shared >= 0.3 * busy, f"stage {stage}: {shared:.0f} of {busy:.0f} us overlap"


def test_collectives_run_beside_compute() -> None:
    run(_apart, 1)


def _never_waits(rank: int, world: int, ranks: int, kind: str) -> None:
    if ranks > 1:
        use_fake_group(ranks)
    x = torch.randn(64, 256, device="cuda")
    for stage in range(4):
        settings = {"on_nonfinite": "skip"} if kind == "skip" else {}
        model = layers("cuda", width=256, depth=4)
        opt = shard(model, stage, **settings)
        scaler = torch.amp.GradScaler("cuda", enabled=kind == "scaler")

        def step(model=model, opt=opt, scaler=scaler) -> None:
            with torch.autocast("cuda", torch.float16, enabled=kind == "scaler"):
                loss = model(x).float().square().mean()
            scaler.scale(loss).backward()
            if kind != "skip":
                scaler.unscale_(opt)
                opt.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()

        for _ in range(WARM):
            step()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(3):
                step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        opt.synchronize()


@pytest.mark.parametrize("kind", ["clipping", "scaler", "skip"])
@pytest.mark.parametrize("ranks", [1, RANKS])
def test_no_step_waits_for_the_gpu(ranks: int, kind: str) -> None:
    run(_never_waits, 1, ranks, kind)


def _captured(rank: int, world: int, stage: int) -> None:
    x = torch.randn(64, 256, device="cuda")
    weights = []
    for captures in (False, True):
        torch.manual_seed(0)
        model = layers("cuda", width=256, depth=4)
        opt = shard(model, stage, lr=1e-2)

        def step(model=model, opt=opt) -> None:
            model(x).square().mean().backward()
            opt.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM):
                step()
        torch.cuda.current_stream().wait_stream(side)
        opt.synchronize()
        torch.cuda.synchronize()
        if captures:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=side):
                step()
        for _ in range(4):
            graph.replay() if captures else step()
        torch.cuda.synchronize()
        weights.append([zero.full_param(p) for p in model.parameters()])
    for eager, replayed in zip(*weights, strict=True):
        assert torch.equal(eager, replayed), (eager - replayed).abs().max()


@pytest.mark.parametrize("stage", range(4))
def test_a_step_in_a_cuda_graph_gives_the_same_weights(stage: int) -> None:
    run(_captured, 1, stage)
