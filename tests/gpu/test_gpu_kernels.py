"""Steps of the CUDA kernels beside those of the CPU's, which have tests of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from ranks import run
from torch import nn

import zero_torch as zero

RULES = {
    "adamw": {"lr": 1e-2, "weight_decay": 0.1},
    "adam": {"lr": 1e-2, "weight_decay": 0.1, "amsgrad": True},
    "sgd": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "lion": {"lr": 1e-3, "weight_decay": 0.1},
}


class Weights(nn.Module):
    """Whose gradients are whatever is asked for, to the bit."""

    def __init__(self) -> None:
        super().__init__()
        for at, shape in enumerate([(1,), (17,), (64, 33), (1000, 1031)]):
            self.register_parameter(f"p{at}", nn.Parameter(torch.randn(shape)))

    def forward(self, step: int) -> torch.Tensor:
        loss = torch.zeros((), device=self.p0.device)
        for at, p in enumerate(self.parameters()):
            generator = torch.Generator().manual_seed(100 * step + at)
            wanted = torch.randn(p.shape, generator=generator).to(p.device, p.dtype)
            loss = loss + (p * wanted).sum().float()
        return loss


def _same_steps(rank: int, world: int, rule: str, settings: dict[str, Any]) -> None:
    for stage in range(4):
        torch.manual_seed(0)
        on_cpu = Weights()
        on_gpu = copy.deepcopy(on_cpu).cuda()
        both = [(m, zero.ZeroOptimizer(m, rule, stage=stage, **settings)) for m in (on_cpu, on_gpu)]
        for step in range(5):
            norms = []
            for model, opt in both:
                model(step).backward()
                norms.append(opt.clip_grad_norm_(100.0).cpu())
                opt.step()
                opt.zero_grad()
            torch.testing.assert_close(norms[1], norms[0], rtol=2e-7, atol=0.0)
        states = [zero.state_dict(model, rank0_only=False) for model, _ in both]
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name].cpu(), value, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rule", sorted(RULES))
def test_a_model_on_the_gpu_steps_as_one_on_the_cpu(rule: str, dtype: torch.dtype | None) -> None:
    run(_same_steps, 1, rule, {**RULES[rule], "param_dtype": dtype})
