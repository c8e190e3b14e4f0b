"""Mixed precision beside training: what is held and sent, state dicts, writes, odd models."""

from __future__ import annotations

import copy

import pytest
import torch
from models import mlp
from ranks import at_each_stage, run
from torch import nn

import zero_torch as zero

BF16 = torch.bfloat16


def close(a: torch.Tensor, b: torch.Tensor, rtol: float = 1e-6) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=1e-7)


def made(stage: int, model: nn.Module, rule: str = "sgd", **kw: object) -> zero.ZeroOptimizer:
    kw.setdefault("lr", 0.1)
    kw.setdefault("param_dtype", BF16)
    return zero.ZeroOptimizer(model, rule, stage=stage, min_unit_numel=0, **kw)


def train(model: nn.Module, opt: zero.ZeroOptimizer, rank: int, steps: int, first: int = 0) -> None:
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(10 * step + rank)
        x = torch.randn(4, 5, generator=generator).to(next(model.parameters()).dtype)
        model(x).float().square().mean().backward()
        opt.step()
        opt.zero_grad()


# ---- what is held and sent ----


def _bytes(rank: int, world: int, stage: int) -> None:
    features = 64 * world
    model = nn.Linear(features, features, bias=False)
    numel = features * features
    opt = made(stage, model, "adamw")
    shards = world if stage >= 1 else 1
    held = zero.report(opt).as_dict()["held"]
    assert held["optimizer_state"] == 4 * numel // shards  # masters
    model(torch.ones(1, features, dtype=BF16)).sum().backward()
    reduced = zero.report(opt).as_dict()["held"]
    assert reduced["gradients"] == 2 * numel // (world if stage >= 2 else 1)
    opt.step()
    opt.synchronize()
    report = zero.report(opt).as_dict()
    held, theory = report["held"], report["theory"]
    assert held["parameters"] == 2 * numel // (world if stage == 3 else 1)
    assert held["optimizer_state"] == 12 * numel // shards
    assert {k: held[k] for k in ("parameters", "gradients", "optimizer_state")} == {
        k: theory["held"][k] for k in ("parameters", "gradients", "optimizer_state")
    }
    sent = sum(report["traffic"].values())
    part = 2 * numel * (world - 1) // world
    expected = part * (3 if stage == 3 else 2)
    if stage == 3:
        assert sent in (expected, expected - part)  # gathered again for backward, or kept
    else:
        assert sent == theory["traffic"] == expected


def _bytes_of_reductions_in_fp32(rank: int, world: int, stage: int) -> None:
    features = 64 * world
    numel = features * features
    model = nn.Linear(features, features, bias=False)
    opt = made(stage, model, reduce_dtype=torch.float32)
    model(torch.ones(1, features, dtype=BF16)).sum().backward()
    held = zero.report(opt).as_dict()["held"]["gradients"]
    whole = 2 * numel if stage < 2 else 0
    assert held == whole + 4 * numel // (world if stage >= 1 else 1)
    report = zero.report(opt).as_dict()
    assert report["theory"]["held"]["gradients"] == held
    assert report["traffic"]["reduce_scatter"] == 2 * numel * (world - 1) // world  # as bf16


def _half_the_traffic_of_fp32(rank: int, world: int, stage: int) -> None:
    features = 64 * world
    numel = features * features
    torch.manual_seed(0)
    model = nn.Linear(features, features, bias=False)
    opt = made(stage, model, param_dtype=None, reduce_dtype=BF16)
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, features, generator=generator)
    model(x).square().sum().backward()
    total = None
    with zero.gathered(model):
        weight = model.weight.detach().clone()
    for other in range(world):
        w = weight.clone().requires_grad_()
        y = torch.randn(3, features, generator=torch.Generator().manual_seed(other))
        nn.functional.linear(y, w).square().sum().backward()
        sent = w.grad.bfloat16().float()
        total = sent if total is None else total + sent
    expected = (total / world).bfloat16().float()
    assert torch.equal(zero.full_grad(model.weight).float(), expected)
    traffic = zero.report(opt).as_dict()["traffic"]
    reduced = traffic["all_reduce"] if stage == 0 else 2 * traffic["reduce_scatter"]
    assert reduced == 2 * 2 * numel * (world - 1) // world


def test_bytes_held_and_sent_equal_the_table() -> None:
    run(
        at_each_stage,
        2,
        _bytes,
        _bytes_of_reductions_in_fp32,
        _half_the_traffic_of_fp32,
    )


# ---- values ----


def _e21_small_updates(rank: int, world: int, stage: int) -> None:
    for model in (nn.LayerNorm(8, bias=False), nn.LayerNorm(8, bias=False).bfloat16()):
        settings = {"param_dtype": BF16} if model.weight.dtype == torch.float32 else {}
        opt = made(
            stage, model, lr=1e-4, **{"param_dtype": None, **settings}, master_dtype=torch.float32
        )
        for _ in range(100):
            model.weight.register_hook(lambda _: torch.ones(8, dtype=BF16))
            model(torch.ones(1, 8, dtype=BF16)).sum().backward()
            opt.step()
            opt.zero_grad()
        close(zero.full_param(model.weight), torch.full((8,), 0.99), rtol=1e-5)
        with zero.gathered(model):
            assert torch.equal(model.weight, torch.full((8,), 0.98828125, dtype=BF16))
        opt.release()


def _masters_off(rank: int, world: int, stage: int) -> None:
    """A 16-bit model alone is trained in 16 bits; several backwards are added up in fp32."""
    model = nn.Linear(1, 1, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt = made(stage, model, lr=2.0**-7, param_dtype=None)
    x = torch.ones(1, 1, dtype=BF16)
    for value in (1.0, 2.0**-9, 2.0**-9):  # in bf16 each of the small ones would be lost
        model(x * value).sum().backward()
    assert zero.full_grad(model.weight).float().item() == 1.0 + 2.0**-8
    opt.step()
    assert zero.full_param(model.weight).dtype == BF16
    held = zero.report(opt).as_dict()["held"]
    assert held["optimizer_state"] == 0
    opt.release()


def _state_dicts(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    source = mlp()
    values = copy.deepcopy(source.state_dict())
    model = mlp(seed=5 + rank)
    opt = made(stage, model, "adamw", lr=1e-3)
    model.load_state_dict(values)
    for state in (model.state_dict(), zero.state_dict(model, rank0_only=False)):
        assert all(torch.equal(state[name], value) for name, value in values.items())
    train(model, opt, rank, 3)
    state = zero.state_dict(model)
    assert bool(state) == (rank == 0)
    whole = zero.state_dict(model, rank0_only=False)
    assert any(not torch.equal(v, v.bfloat16().float()) for v in whole.values())
    moments = zero.optimizer_state_dict(opt, rank0_only=False)
    assert all(s["exp_avg"].dtype == torch.float32 for s in moments["state"].values())

    other = mlp(seed=9)
    resumed = made(stage, other, "adamw", lr=1e-3)
    zero.load_state_dict(other, state)  # rank 0's
    zero.load_state_dict(resumed, moments, rank0_only=False)
    train(model, opt, rank, 3, first=3)
    train(other, resumed, rank, 3, first=3)
    ended, again = (zero.state_dict(m, rank0_only=False) for m in (model, other))
    assert all(torch.equal(ended[name], again[name]) for name in ended)


def _writes(rank: int, world: int, stage: int) -> None:
    """What is written becomes the master; what is not keeps the bits that bf16 lacks."""
    model = nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        model.weight.copy_(1 + torch.arange(16.0).view(4, 4) * 1e-3)
    before = model.weight.detach().clone()
    opt = made(stage, model)
    before = zero.full_param(model.weight).clone()
    with zero.gathered(model, writeback=True), torch.no_grad():
        model.weight[1] = 7.0
    expected = before.clone()
    expected[1] = 7.0
    assert torch.equal(zero.full_param(model.weight), expected)
    if stage < 3:
        model.weight.data[2].fill_(3.0)
        expected[2] = 3.0
        assert torch.equal(zero.full_param(model.weight), expected)
    model(torch.zeros(1, 4, dtype=BF16)).sum().backward()
    opt.step()  # by a gradient of zero
    assert torch.equal(zero.full_param(model.weight), expected)


def test_values_of_masters_and_state_dicts() -> None:
    run(at_each_stage, 2, _e21_small_updates, _masters_off, _state_dicts, _writes)


# ---- models ----


class Odd(nn.Module):
    """A batch norm, a frozen part, an integer buffer and something that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.shared = nn.Linear(6, 6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor, *, more: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.calls += 1
        assert x.dtype == more["x"].dtype == BF16
        assert more["index"].dtype == torch.long
        x = self.norm(self.first(x + more["x"]))
        y = self.shared(self.shared(x)) + self.frozen(x)
        return {"y": y * self.scale, "index": more["index"]}


def _odd_model(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(0)
    model = Odd()
    frozen = model.frozen.weight.detach().clone()
    opt = made(
        stage,
        model,
        "adamw",
        lr=1e-2,
        cast_forward_inputs=True,
        output_dtype=torch.float32,
    )
    assert model.norm.running_mean.dtype == torch.float32
    assert model.norm.weight.dtype == torch.float32
    assert model.first.weight.dtype == model.frozen.weight.dtype == BF16
    losses = []
    for _ in range(30):
        x = torch.randn(16, 5, generator=torch.Generator().manual_seed(rank))
        out = model(x, more={"x": x, "index": torch.arange(3)})
        assert out["y"].dtype == torch.float32
        assert out["index"].dtype == torch.long
        loss = (out["y"] - 1).square().mean()
        loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    assert losses[-1] < 0.5 * losses[0]
    assert torch.equal(zero.full_param(model.frozen.weight).float(), frozen.bfloat16().float())
    every = [zero.full_param(p) for p in model.parameters()]
    for other in zero_exchange(opt, every):
        assert all(torch.equal(a, b) for a, b in zip(every, other, strict=True))
    assert model.calls.item() == 30


def zero_exchange(opt: zero.ZeroOptimizer, values: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    from zero_torch import _wire

    return _wire.exchange(opt._live, values)


def _deferred(rank: int, world: int, stage: int) -> None:
    torch.manual_seed(3)
    plain = mlp()
    with zero.deferred_init():
        model = mlp()
    opt = made(stage, model, init_from=plain.state_dict())
    whole = zero.state_dict(model, rank0_only=False)
    assert all(torch.equal(whole[name], value) for name, value in plain.state_dict().items())
    assert all(p.dtype == BF16 for p in model.parameters())
    train(model, opt, rank, 1)


def _grad_scaler_in_fp16(rank: int, world: int, stage: int) -> None:
    model = nn.Linear(2, 1, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
    opt = made(stage, model, lr=1.0, param_dtype=torch.float16)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
    tiny = 2.0**-15  # in fp16, less than half of its bits would be left of it
    x = torch.tensor([[2.0**-3, tiny * (1 + 2.0**-9)]], dtype=torch.float32).half()
    scaler.scale(model(x).float().sum()).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    expected = torch.tensor([[1.0, 1.0]]) - x.float()
    close(zero.full_param(model.weight), expected)
    x = torch.tensor([[64.0, 1.0]], dtype=torch.float16)  # 64 * 2**12 overflows, on one rank
    scaler.scale(model(x if rank == 1 else x * 0).float().sum()).backward()
    scaler.step(opt)
    scaler.update()
    assert scaler.get_scale() == 2.0**11
    close(zero.full_param(model.weight), expected)


def test_models_of_many_kinds() -> None:
    run(at_each_stage, 2, _odd_model, _deferred, _grad_scaler_in_fp16)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"param_dtype": torch.int8}, "param_dtype"),
        ({"param_dtype": BF16, "reduce_dtype": torch.float16}, "reduce_dtype"),
        ({"master_dtype": BF16}, "master_dtype"),
        ({"cast_forward_inputs": True}, "cast_forward_inputs"),
        ({"param_dtype": "bfloat16"}, "param_dtype"),
    ],
)
def test_bad_settings_are_refused_by_name(settings: dict[str, object], named: str) -> None:
    with pytest.raises((TypeError, ValueError), match=named):
        zero.ZeroOptimizer(nn.Linear(2, 2), stage=1, lr=0.1, **settings)


def test_casts_need_a_module() -> None:
    with pytest.raises(TypeError, match="output_dtype"):
        zero.ZeroOptimizer(
            nn.Linear(2, 2).parameters(), stage=1, lr=0.1, output_dtype=torch.float32
        )
