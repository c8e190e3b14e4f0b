"""The model of benchmarks/scaling_model.py, by hand-made arithmetic and by published steps."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))

import published_steps
import scaling_model
from scaling_model import Cluster, Collective, Link, Timeline, Transfer, Unit


def cluster(gather=(0.0, 1.0), reduce=(0.0, 1.0), ranks=2, share=0.0):
    """``share``: of a collective's time, by which it puts computation off."""

    def collective(alpha, beta):
        return Collective(Link(alpha, beta), Link(alpha, beta), Link(share * alpha, share * beta))

    return Cluster(ranks, collective(*gather), collective(*reduce))


def test_a_ring_of_1024_ranks_takes_its_hops_and_its_bytes():
    link = scaling_model.ring(1024, 8, hop=3.4e-6, node_hop=9.6e-6, bandwidth=1e9)
    assert link.alpha == pytest.approx(896 * 3.4e-6 + 127 * 9.6e-6)
    assert link.seconds(1024e6, 1024) == pytest.approx(link.alpha + 1.023)
    assert scaling_model.ring(8, 8, 1e-6, 1e-3, 1.0).alpha == pytest.approx(7e-6)
    assert link.seconds(1e9, 1) == 0.0


@pytest.mark.parametrize(("stage", "sent"), [(0, 1.5), (1, 1.5), (2, 1.5), (3, 2.25)])
def test_traffic_is_that_of_the_stages(stage, sent):
    # 2 and 3 times the parameters by (N-1)/N
    assert scaling_model.traffic(stage, gathered=1.0, reduced=1.0, ranks=4) == sent


def test_what_takes_the_processor_whole_adds_up():
    units = [Unit(1.0, 2.0, 10.0, 10.0), Unit(1.0, 2.0, 6.0, 6.0)]
    serial = cluster(gather=(0.5, 0.1), reduce=(0.25, 0.2), share=1.0)
    gathers = 2 * 0.5 + 0.1 * 16 / 2
    reductions = 2 * 0.25 + 0.2 * 16 / 2
    assert scaling_model.step_seconds(0, units, serial, 3.0) == pytest.approx(
        6 + 3.0 + gathers + reductions
    )
    assert scaling_model.step_seconds(2, units, serial, 3.0) == pytest.approx(
        6 + 1.5 + gathers + reductions
    )
    assert scaling_model.step_seconds(3, units, serial, 3.0) == pytest.approx(
        6 + 1.5 + 2 * gathers + reductions
    )


def test_a_pipeline_of_stage_3_by_hand():
    """Gathers of 1 s, reductions of 1 s, forward 3 s, backward 6 s, two units: the first gather
    and the last reduction are seen, the rest is hidden."""
    units = [Unit(3.0, 6.0, 2.0, 2.0)] * 2
    assert scaling_model.step_seconds(3, units, cluster(), 0.0) == pytest.approx(1 + 6 + 12 + 1)


def test_a_pipeline_of_stage_3_that_the_network_holds_up():
    """Computation is free: all of the network's time is seen, and no more."""
    units = [Unit(0.0, 0.0, 2.0, 4.0)] * 5
    assert scaling_model.step_seconds(3, units, cluster(), 0.0) == pytest.approx(5 * (1 + 1 + 2))


def test_a_pipeline_of_stage_1_hides_all_but_its_ends():
    units = [Unit(3.0, 6.0, 2.0, 2.0)] * 3
    assert scaling_model.step_seconds(1, units, cluster(), 4.0) == pytest.approx(1 + 9 + 18 + 1 + 2)


def test_a_transfer_beside_computation_by_hand():
    """4 s alone; beside computation 8 s, of which it takes 2: computation goes at 3/4."""
    run = Timeline()
    first = run.send(Transfer(alone=4.0, beside=8.0, taken=2.0))
    run.compute(3.0)  # takes 4 s: half of the transfer
    assert run.now == pytest.approx(4.0)
    run.wait(first)  # the other half, alone
    assert run.now == pytest.approx(6.0)
    run.compute(1.0)
    assert run.now == pytest.approx(7.0)
    run.send(Transfer(4.0, 8.0, 2.0))
    run.compute(8.0)  # 6 s of it in 8 s, then the rest
    assert run.now == pytest.approx(7.0 + 8.0 + 2.0)


def test_stage_0_gathers_behind_each_reduction():
    """The last bucket's two transfers are seen, those of the first are hidden."""
    units = [Unit(3.0, 6.0, 2.0, 2.0)] * 2
    assert scaling_model.step_seconds(0, units, cluster(), 4.0) == pytest.approx(6 + 12 + 2 + 4)


def test_buckets_are_what_backward_completes_first_last():
    assert scaling_model.buckets([5, 30], first=4, limit=20) == [11, 20, 4]


def test_links_are_found_again_from_their_times():
    link = Link(2e-4, 3e-10)
    points = [(size, link.seconds(size, 4)) for size in (2**20, 2**24, 2**26)]
    found = scaling_model.fitted(points, 4)
    assert found.alpha == pytest.approx(link.alpha) and found.beta == pytest.approx(link.beta)


def test_times_that_grow_faster_than_the_sizes_fit_no_negative_latency():
    found = scaling_model.fitted([(1e6, 1e-4), (1e8, 5e-2)], 2)
    assert found.alpha == 0.0 and found.beta > 0


def test_measured_steps_are_compared_with_what_collectives_took():
    """One round: 2 s of forward and backward and 0.5 s of optimizer where each rank is alone, at
    stage 3 1 s more; 1 ms a MiB and rank (the size of 2 MiB by 1/2), that computation waits for."""
    mib = 2**20
    sizes = [mib, mib]
    cases = [
        {
            "collective": kind,
            "dtype": "Float",
            "bytes": n * mib,
            "seconds": {"host": [n * 5e-4]},
            "beside": {"host": {"seconds": [n * 5e-4], "taken": [n * 5e-4]}},
        }
        for kind in ("all_gather", "reduce_scatter")
        for n in (2, 16)
    ]
    tiny = {"collective": "all_reduce", "dtype": "Float", "bytes": 8, "seconds": {"host": [0.25]}}
    collectives = {"data": {"runs": [{"ranks": 2, "cases": [tiny, *cases]}]}}
    round_ = {
        "plain": {"seconds": [4.0]},
        "zero0_alone": {"seconds": [2.5], "forward_backward": 2.0},
        "zero1_alone": {"seconds": [2.5, 2.5], "forward_backward": 2.0},
        "zero3_alone": {"seconds": [3.5], "forward_backward": 3.0},
    }
    ratios = {"plain": [1.0], "zero0": [0.75], "zero1": [0.625], "zero3": [0.63], "ddp": [2.0]}
    ratios |= {"zero0_alone": [0.625], "zero1_alone": [0.625], "zero3_alone": [0.875]}
    steps = {"data": {"ranks": 2, "rounds": [round_], "ratios": ratios}}
    found = scaling_model.compare(steps, collectives, sizes)
    rows = {r["strategy"]: r["model"] for r in found}
    assert set(rows) == {"zero0", "zero1", "zero3"}
    assert rows["zero0"] == pytest.approx((2 + 0.5 + 2 * 2 * 5e-4 + 0.25) / 4)
    assert rows["zero1"] == pytest.approx((2 + 0.25 + 2 * 2 * 5e-4 + 0.25) / 4)
    assert rows["zero3"] == pytest.approx((3 + 0.25 + 3 * 2 * 5e-4 + 0.25) / 4)
    assert [r["alone"] for r in found] == [0.625, 0.625, 0.875]
    assert found[0]["error"] == pytest.approx(rows["zero0"] / 0.75 - 1)


def test_megatrons_zero3_steps():
    """Two rows of the 175 B model fit the two unknowns. Predictions are up to 9.5% off: the model
    has the larger one too slow where the network holds it up."""
    points = published_steps.megatron()
    assert [p.published for p in points] == [144.0, 88.0, 44.0, 138.0, 98.0, 48.0]
    assert [p.fit for p in points] == [True, False, True, False, False, False]
    errors = [p.error for p in points]
    assert errors[0] == pytest.approx(0, abs=1e-3) and errors[2] == pytest.approx(0, abs=1e-3)
    assert abs(errors[1]) < 0.02  # the same model on 768 GPUs
    assert max(abs(error) for error in errors[3:]) < 0.10


def test_torchtitans_fsdp2_steps():
    """From 8 to 128 GPUs 1.8 to 2.7% of the rate are lost. The model hides nearly all transfers, so
    it is right within 2.7%, but explains nearly nothing of that loss."""
    points = [p for p in published_steps.torchtitan() if not p.fit]
    assert [p.published for p in points] == [5605.0, 6514.0, 8380.0]
    assert all(0 < p.error < 0.027 for p in points)
    layers = published_steps.LLAMA_LAYERS * published_steps.LLAMA_LAYER
    assert layers + published_steps.LLAMA_ENDS == pytest.approx(8.03e9, rel=0.001)
