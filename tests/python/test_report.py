"""What report() says and how."""

import pytest
import torch
from small_model import make_model, train

import zero_torch as zero


def test_report_has_the_documented_keys():
    model = make_model()
    optimizer = zero.ZeroOptimizer(model, stage=1)
    train(model, optimizer, 2)
    numbers = zero.report(optimizer).as_dict()
    kinds = {"parameters", "gradients", "optimizer_state", "buffers"}
    assert set(numbers) == {"held", "peak", "traffic", "theory"}
    assert set(numbers["held"]) == set(numbers["peak"]) == set(numbers["theory"]["held"]) == kinds
    assert set(numbers["traffic"]) == {"reduce_scatter", "all_gather", "all_reduce", "broadcast"}
    assert set(numbers["theory"]) == {"held", "traffic"}
    numel = sum(p.numel() for p in model.parameters())
    assert numbers["theory"]["held"]["optimizer_state"] == 8 * numel
    assert sum(numbers["traffic"].values()) == numbers["theory"]["traffic"] == 0
    assert "parameters" in str(zero.report(optimizer))
    assert zero.report(optimizer).steps == 2
    assert zero.report(optimizer).nonfinite_steps == 0
    assert zero.report(optimizer).nonfinite_parameter is None
    with pytest.raises(TypeError, match="ZeroOptimizer"):
        zero.report(model)


def test_state_of_torch_classes_is_counted_beside_the_masters():
    model = make_model()
    numel = sum(p.numel() for p in model.parameters())
    optimizer = zero.ZeroOptimizer(
        model,
        torch.optim.SGD,
        stage=1,
        lr=0.1,
        momentum=0.9,
        param_dtype=torch.bfloat16,
        cast_forward_inputs=True,
    )
    padded = optimizer_state(optimizer)
    assert padded >= 4 * numel  # masters, each parameter rounded up to 64 bytes
    for _ in range(2):
        train(model, optimizer, 1)
        assert optimizer_state(optimizer) == padded + 4 * numel


def optimizer_state(optimizer: zero.ZeroOptimizer) -> int:
    return zero.report(optimizer).as_dict()["held"]["optimizer_state"]
