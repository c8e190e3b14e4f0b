"""A rank of eight, without the other seven: torch's "fake" group, for profiles and estimates."""

from __future__ import annotations

import torch
import torch.distributed as dist
from fake_group import layers, shard, use_fake_group
from ranks import run

import zero_torch as zero

RANKS = 8


def _as_in_theory(rank: int, world: int) -> None:
    use_fake_group(RANKS)
    for stage in range(4):
        torch.manual_seed(0)
        model = layers(width=64)
        whole = sum(p.numel() * 4 for p in model.parameters())
        weights = [p.detach().clone() for p in model.parameters()]
        opt = shard(model, stage)
        report = zero.report(opt)
        assert report.transport == f"fake ({RANKS} ranks)"
        assert set(report.as_dict()["traffic"].values()) == {0}
        for _ in range(2):  # the first learns in which order units are used
            before = zero.report(opt).as_dict()["traffic"]
            model(torch.ones(2, 64)).square().sum().backward()
            held = zero.report(opt).as_dict()["held"]
            assert held["gradients"] == whole // (RANKS if stage >= 2 else 1), stage
            opt.step()
            opt.zero_grad()
            opt.synchronize()
        report = zero.report(opt).as_dict()
        assert report["held"]["parameters"] == whole // (RANKS if stage == 3 else 1)
        assert report["held"]["optimizer_state"] == 2 * whole // (RANKS if stage >= 1 else 1)
        each = whole // RANKS * (RANKS - 1)
        sent = {
            "reduce_scatter": 0 if stage == 0 else each,
            # Nothing is left between this model's last layer and its backward: it stays.
            "all_gather": [0, each, each, 2 * each - each // len(model)][stage],
            "all_reduce": 2 * each if stage == 0 else 0,
            "broadcast": 0,
        }
        assert {k: v - before[k] for k, v in report["traffic"].items()} == sent, stage
        assert report["theory"]["traffic"] == [2, 2, 2, 3][stage] * each
        # This rank's first eighth of each layer was stepped.
        for before_step, p in zip(weights, model.parameters(), strict=True):
            own = slice(0, p.numel() // RANKS)
            moved = zero.full_param(p).flatten()[own] != before_step.flatten()[own]
            assert moved.float().mean() > 0.9, stage
    dist.destroy_process_group()


def test_a_rank_of_eight_holds_and_sends_what_theory_says() -> None:
    run(_as_in_theory, 1)
