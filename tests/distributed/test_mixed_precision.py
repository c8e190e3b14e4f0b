"""Parameters that compute in 16 bits, with fp32 masters: against the same recipe in one process.

The reference keeps fp32 masters itself, rounds them to make each rank's model, runs every rank's
data through that in plain torch, sums gradients in rank order in fp32 and steps torch.optim on the
masters. After each step its masters become ours, once they were found equal within a few ulp: a
difference in the last bit can change a rounded weight.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import GPT
from ranks import run
from torch import nn

import zero_torch as zero

VOCAB = 53
DEFAULT = {torch.bfloat16: torch.bfloat16, torch.float16: torch.float32}  # reduce_dtype
RULES: dict[str, Any] = {"adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
HYPER: dict[str, dict[str, float]] = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "sgd": {"lr": 0.1, "momentum": 0.9},
}


def model_of(seed: int = 0) -> GPT:
    torch.manual_seed(seed)
    return GPT(depth=1)


def loss_of(model: nn.Module, rank: int, step: int, micro: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + micro)
    tokens = torch.randint(0, VOCAB, (3, 8), generator=generator)
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Reference:
    """One process that does what all ranks do, in plain torch."""

    def __init__(self, model: nn.Module, rule: str, dtype: torch.dtype, reduced: torch.dtype):
        self.masters = copy.deepcopy(model).float()
        self.optimizer = RULES[rule](self.masters.parameters(), **HYPER[rule], foreach=False)
        self.dtype, self.reduced = dtype, reduced

    def gradients(
        self, world: int, step: int, micros: int, local: bool
    ) -> dict[str, torch.Tensor | None]:
        """``local``: each rank sums its micro-batches before they are reduced (no_sync)."""
        rounded = copy.deepcopy(self.masters).to(self.dtype)
        names = [name for name, _ in rounded.named_parameters()]
        total: dict[str, torch.Tensor] = {}
        for group in [range(micros)] if local else [[micro] for micro in range(micros)]:
            of_ranks = [self._of_rank(rounded, rank, step, group) for rank in range(world)]
            for name in names:
                mean = _in_order([gradients[name] for gradients in of_ranks]) / world
                first = name not in total
                # One reduction is rounded; a later one is added before it is.
                mean = mean.to(self.reduced).float() if first else mean
                total[name] = mean if first else total[name] + mean
        return dict(total)

    def _of_rank(
        self, model: nn.Module, rank: int, step: int, micros: Any
    ) -> dict[str, torch.Tensor]:
        """This rank's micro-batches, added in fp32; what is sent has the model's dtype or fp32."""
        parts = []
        for micro in micros:
            model.zero_grad()
            loss_of(model, rank, step, micro).backward()
            parts.append({n: p.grad.float().clone() for n, p in model.named_parameters()})
        sums = {name: _in_order([part[name] for part in parts]) for name in parts[0]}
        if self.reduced != torch.float32:
            sums = {name: value.to(self.dtype).float() for name, value in sums.items()}
        return sums

    def step(self, gradients: dict[str, torch.Tensor | None]) -> None:
        for name, parameter in self.masters.named_parameters():
            parameter.grad = gradients[name]
        self.optimizer.step()


def _in_order(values: list[torch.Tensor]) -> torch.Tensor:
    total = values[0].clone()
    for value in values[1:]:
        total += value
    return total


def masters_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return zero.state_dict(model, rank0_only=False)


def trained(
    rank: int,
    world: int,
    stage: int,
    rule: str,
    steps: int,
    micros: int,
    local: bool,
    check: Reference | None,
    **settings: Any,
) -> dict[str, torch.Tensor]:
    model = model_of(seed=rank)  # rank 0's values must win
    opt = zero.ZeroOptimizer(model, rule, stage=stage, min_unit_numel=0, **HYPER[rule], **settings)
    for step in range(steps):
        for micro in range(micros):
            sync = not local or micro + 1 == micros
            opt._live.set_requires_gradient_sync(sync)
            loss_of(model, rank, step, micro).backward()
        if check is not None:
            expected = check.gradients(world, step, micros, local)
            for name, parameter in model.named_parameters():
                ours = zero.full_grad(parameter).float()
                assert torch.equal(ours, expected[name]), (stage, step, name)
            check.step(expected)
        opt.step()
        opt.zero_grad()
        if check is not None:
            mine = masters_of(model)
            for name, master in check.masters.named_parameters():
                torch.testing.assert_close(mine[name], master.data, rtol=1e-5, atol=1e-6)
                master.data.copy_(mine[name])
                held = dict(model.named_parameters())
                assert held[name].dtype == check.dtype
    with zero.gathered(model):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, masters_of_one(model, name).to(parameter.dtype)), name
    return masters_of(model)


def masters_of_one(model: nn.Module, name: str) -> torch.Tensor:
    return zero.full_param(dict(model.named_parameters())[name])


def _variants(dtype: torch.dtype) -> Iterator[tuple[torch.dtype | None, int, bool]]:
    yield None, 1, False
    yield None, 3, False
    yield (torch.float32 if dtype == torch.bfloat16 else dtype), 2, False
    yield (torch.float32 if dtype == torch.bfloat16 else dtype), 2, True
    yield None, 2, True


def _parity(rank: int, world: int, dtype: torch.dtype) -> None:
    for (reduce_dtype, micros, local), rule in itertools.product(_variants(dtype), RULES):
        first: dict[str, torch.Tensor] = {}
        for stage in range(4):
            check = Reference(model_of(0), rule, dtype, reduce_dtype or DEFAULT[dtype])
            got = trained(
                rank,
                world,
                stage,
                rule,
                steps=3,
                micros=micros,
                local=local,
                check=check,
                param_dtype=dtype,
                reduce_dtype=reduce_dtype,
            )
            first = first or got
            for name, value in got.items():
                assert value.dtype == torch.float32
                assert torch.equal(value, first[name]), (stage, rule, reduce_dtype, micros, name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_training_equals_the_recipe_in_one_process(world: int, dtype: torch.dtype) -> None:
    run(_parity, world, dtype)
