"""Bodies of tests in this folder that hold on any device, by module."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable

Suite = dict[str, tuple[str, ...]]

# One rank is enough for these.
ALONE: Suite = {
    "test_cases": ("_global_steps", "_kept_gradients", "_infinity_norm", "_step_counts"),
    "test_clipping_cases": ("_infinity", "_norms_of_groups", "_clip_value"),
    "test_freezing": ("_layer_by_layer", "_frozen_again", "_with_masters", "_resumed"),
    "test_hard_cases": (
        "_reentrant",
        "_checkpointed_blocks",
        "_gan",
        "_heads_in_turn",
        "_zero_grad_everywhere",
        "_collected",
        "_dropped_optimizer",
    ),
    "test_mixed_cases": ("_bytes", "_masters_off", "_state_dicts", "_writes", "_deferred"),
    "test_model_cases": ("_two_networks", "_buffers", "_weights_elsewhere"),
    "test_module_cases": ("_outputs", "_in_place_on_outputs", "_several_forwards"),
    "test_parity": ("_ledger", "_memory_at_stage_2"),
    "test_scaling_cases": ("_scale_that_grows", "_like_a_single_process", "_bf16", "_traffic"),
    "test_sharded_life": ("_plain_again", "_lifetime", "_optimizers_come_and_go"),
    "test_stage3": ("_traffic", "_peak", "_no_sync", "_changing_order", "_graphs"),
}

# These are about two, or hold for two as well.
TOGETHER: Suite = {
    "test_cases": ("_accumulate_by_hand", "_no_sync_patterns", "_used_on_one_rank"),
    "test_clipping_cases": ("_infinity", "_norms_of_groups", "_clip_value"),
    "test_freezing": ("_first_backward", "_one_rank_only", "_scaled"),
    "test_hard_cases": ("_checkpointed_blocks", "_double_backward", "_gan", "_state_of_one_rank"),
    "test_mixed_cases": ("_bytes", "_state_dicts", "_deferred", "_grad_scaler_in_fp16"),
    "test_model_cases": ("_two_networks", "_buffers", "_frozen_for_a_while"),
    "test_module_cases": ("_two_backwards", "_one_layer_in_two_segments", "_gradient_penalty"),
    "test_parity": ("_ledger", "_memory_at_stage_2"),
    "test_scaling_cases": ("_one_shard_overflows", "_with_a_scaler", "_traffic"),
    "test_sharded_life": ("_plain_again", "_optimizers_come_and_go"),
    "test_stage3": ("_traffic", "_peak", "_no_sync", "_changing_order"),
}


def run_bodies(rank: int, world: int, module: str, names: tuple[str, ...]) -> None:
    """For ``ranks.run``: each ``body(rank, world)``; a ``body(rank, world, stage)`` at 0 to 3."""
    found = importlib.import_module(module)
    for name in names:
        body = getattr(found, name)
        staged = "stage" in inspect.signature(body).parameters
        for stage in range(4) if staged else [None]:
            _run(body, f"{module}.{name}", rank, world, stage)


def _run(body: Callable[..., object], named: str, rank: int, world: int, stage: int | None) -> None:
    try:
        body(rank, world, *([] if stage is None else [stage]))
    except Exception as error:
        where = "" if stage is None else f" at stage {stage}"
        raise AssertionError(f"{named}{where}: {error}") from error
