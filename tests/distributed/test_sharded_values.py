"""Whole values of a sharded model: gathered, edited, loaded and saved."""

from __future__ import annotations

import io

import pytest
import torch
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from sharded_models import WHOLE
from torch import nn

import zero_torch as zero

SHARDED = r"is sharded \(rank \d of 2\)"


def _sharded(stage: int = 3) -> tuple[nn.Module, zero.ZeroModule, dict[str, torch.Tensor]]:
    model = make_gpt()
    return model, zero.ZeroModule(model, stage=stage, **WHOLE), weights(make_gpt())


def _all_sharded(model: nn.Module) -> None:
    for p in model.parameters():
        with torch.no_grad(), pytest.raises(RuntimeError, match=SHARDED):
            p.sum()


def _fail_inside(layer: nn.Linear, writeback: bool, rank: int) -> None:
    with zero.gathered(layer, writeback=writeback), torch.no_grad():
        if writeback and rank == 0:
            layer.weight[1] = 8.0
        raise ZeroDivisionError


def _gathered(rank: int, world: int) -> None:
    model, wrapped, want = _sharded()
    up, qkv = model.blocks[1].up, model.blocks[0].qkv
    for target in (model, wrapped, up.weight, [up.weight, qkv.bias], model.blocks[1], up):
        with zero.gathered(target), torch.no_grad():
            assert torch.equal(up.weight, want["blocks.1.up.weight"])
            assert up.weight.detach().numpy().sum() == want["blocks.1.up.weight"].numpy().sum()
            if target is model or target is wrapped:
                assert_equal(weights(model), want)
            elif not isinstance(target, list):
                with pytest.raises(RuntimeError, match=SHARDED):
                    qkv.bias.sum()
        _all_sharded(model)
    with zero.gathered([]), zero.gathered(nn.Linear(2, 2)):
        pass
    # Rank 0's edits win, whatever the others write.
    with zero.gathered(up.weight, writeback=True), torch.no_grad():
        up.weight.fill_(3.0 if rank == 0 else 5.0)
        up.bias.add_(0.0)
    assert zero.full_param(up.weight).eq(3).all()
    want["blocks.1.up.weight"].fill_(3)
    assert_equal(weights(model), want)
    _all_sharded(model)
    with zero.gathered(model, writeback=True), torch.no_grad():
        for p in model.parameters():
            if rank == 0:
                p.mul_(2)
    want = {name: 2 * value for name, value in want.items()}
    assert_equal(weights(model), want)
    # Nested, in both ways round.
    with zero.gathered(model):
        with zero.gathered(up, writeback=True), torch.no_grad():
            if rank == 0:
                up.weight[0] = 9.0
        with torch.no_grad():
            assert up.weight[0].eq(9).all() and torch.equal(qkv.bias, want["blocks.0.qkv.bias"])
    want["blocks.1.up.weight"][0] = 9
    with zero.gathered(up, writeback=True), torch.no_grad():
        with zero.gathered(model):
            if rank == 0:
                up.bias.fill_(4.0)
        assert up.bias.eq(4).all() or rank == 1
    want["blocks.1.up.bias"].fill_(4)
    assert_equal(weights(model), want)
    _all_sharded(model)
    # What was written before an exception counts, as in a plain module.
    for writeback in (False, True):
        with pytest.raises(ZeroDivisionError):
            _fail_inside(up, writeback, rank)
        _all_sharded(model)
    want["blocks.1.up.weight"][1] = 8
    assert_equal(weights(model), want)
    # A forward and a backward inside use what is there.
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    before = zero.report(opt).as_dict()["traffic"]["all_gather"]
    with zero.gathered(model):
        loss_of(wrapped, batch(0, rank)).backward()
    assert zero.report(opt).as_dict()["traffic"]["all_gather"] == before
    opt.step()
    plain = make_gpt()
    plain.load_state_dict(want)
    other = zero.ZeroOptimizer(plain, stage=0, lr=1e-2)
    loss_of(plain, batch(0, rank)).backward()
    other.step()
    assert_equal(weights(model), weights(plain))


def _version(rank: int, world: int) -> None:
    """Gathers bump no version; steps and writes do, so that stale graphs are errors."""
    model, wrapped, _ = _sharded()
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    loss_of(wrapped, batch(0, rank)).backward()
    opt.step()
    versions = [p._version for p in model.parameters()]
    with zero.gathered(model):
        pass
    model.state_dict()
    loss = loss_of(wrapped, batch(0, rank))
    assert [p._version for p in model.parameters()] == versions
    opt.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    opt.zero_grad()
    loss = loss_of(wrapped, batch(0, rank))
    with zero.gathered(model, writeback=True), torch.no_grad():
        model.blocks[0].up.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    opt.zero_grad()
    loss_of(wrapped, batch(0, rank)).backward()
    opt.step()


def _moved(rank: int, world: int) -> None:
    model, wrapped, want = _sharded()
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    p = model.blocks[1].up.weight
    for value in (3.0, 4.0):
        p.data = torch.full(p.shape, value)
        with torch.no_grad():
            assert p.eq(value).all()
        if value == 3.0:
            loss_of(wrapped, batch(0, rank)).backward()
            want["blocks.1.up.weight"].fill_(3)
            plain = make_gpt()
            plain.load_state_dict(want)
            other = zero.ZeroOptimizer(plain, stage=0, lr=1e-2)
            loss_of(plain, batch(0, rank)).backward()
            for o in (opt, other):
                o.step()
                o.zero_grad()
            want = weights(plain)
            assert_equal(weights(model), want)
    want["blocks.1.up.weight"].fill_(4)
    assert_equal(weights(model), want)
    p.data = torch.ones(2, 2)
    with pytest.raises(TypeError, match=r"'blocks\.1\.up\.weight' was moved"):
        opt.step()
    p.data = torch.full((44, 11), 4.0)
    opt.synchronize()
    assert_equal(weights(model), want)


def _loads(rank: int, world: int) -> None:
    torch.manual_seed(5)
    new = {name: torch.randn_like(value) for name, value in weights(make_gpt()).items()}
    new["head.weight"] = new["tokens.weight"]
    part = {name: value for name, value in new.items() if name.startswith("blocks.0")}
    shifted = {"bad": torch.ones(2), **part}
    wrong = {**new, "blocks.0.up.weight": torch.ones(3, 3)}
    for assign in (False, True):
        model, wrapped, want = _sharded()
        ids = [id(p) for p in model.parameters()]
        for target in (wrapped, model):
            with pytest.raises(RuntimeError, match="Missing key"):
                target.load_state_dict(part, assign=assign)
            target.load_state_dict(weights(make_gpt()), assign=assign)
            assert_equal(weights(model), want)
            result = target.load_state_dict(shifted, strict=False, assign=assign)
            assert result.unexpected_keys == ["bad"] and "norm.weight" in result.missing_keys
            assert_equal(weights(model), {**want, **part})
            with pytest.raises(RuntimeError, match="size mismatch"):
                target.load_state_dict(wrong, assign=assign)
            target.load_state_dict(new, assign=assign)
            assert_equal(weights(model), new)
            _all_sharded(model)
        model.blocks[1].load_state_dict(make_gpt().blocks[1].state_dict(), assign=assign)
        assert_equal(weights(model.blocks[1]), weights(make_gpt().blocks[1]))
        with zero.gathered(model):
            model.blocks[1].load_state_dict(
                {k[9:]: v for k, v in new.items() if k.startswith("blocks.1")}, assign=assign
            )
        assert_equal(weights(model), new)
        loss_of(wrapped, batch(0, rank)).backward()
        assert [id(p) for p in model.parameters()] == ids
    model, wrapped, want = _sharded()
    for target in (wrapped, model):
        zero.load_state_dict(target, new if rank == 0 else None)
        assert_equal(weights(model), new)
        zero.load_state_dict(target, want, rank0_only=False)
        assert_equal(weights(model), want)
        with pytest.raises(RuntimeError, match="missing keys"):
            zero.load_state_dict(target, part if rank == 0 else None)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.up\.weight.*shape"):
            zero.load_state_dict(target, wrong if rank == 0 else None)
        with pytest.raises((TypeError, RuntimeError), match="expected state_dict to be a dict"):
            zero.load_state_dict(target, None)
        assert_equal(weights(model), want)
        zero.load_state_dict(target, shifted if rank == 0 else None, strict=False)
        assert_equal(weights(model), {**want, **part})
        zero.load_state_dict(target, want if rank == 0 else {})
    _all_sharded(model)


def _saves(rank: int, world: int) -> None:
    model, wrapped, want = _sharded()
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    loss_of(wrapped, batch(0, rank)).backward()
    opt.step()
    want = {n: zero.full_param(p) for n, p in model.named_parameters(remove_duplicate=False)}
    for state in (model.state_dict(), wrapped.state_dict()):
        assert list(state) == list(make_gpt().state_dict())
        assert_equal(dict(state), want)
        assert state._metadata == make_gpt().state_dict()._metadata
        assert not any(value.requires_grad for value in state.values())
        assert all(
            value.untyped_storage().nbytes() <= 4 * value.numel() for value in state.values()
        )
    assert_equal(
        dict(model.blocks[0].state_dict(prefix="x.")),
        {f"x.{n[9:]}": v for n, v in want.items() if n.startswith("blocks.0.")},
    )
    assert_equal(model.head.state_dict(), {"weight": want["head.weight"]})
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is p for name, p in model.named_parameters(remove_duplicate=False))
    whole = zero.state_dict(model)
    assert (whole == {}) if rank else (whole.keys() == want.keys())
    if rank == 0:
        assert_equal(dict(whole), want)
    assert_equal(dict(zero.state_dict(wrapped, rank0_only=False)), want)
    with zero.gathered(model):
        assert_equal(dict(model.state_dict()), want)
    file = io.BytesIO()
    torch.save(wrapped.state_dict(), file)
    assert file.tell() < 2 * sum(4 * v.numel() for v in want.values()) + 20000
    file.seek(0)
    plain = make_gpt(seed=9)
    plain.load_state_dict(torch.load(file))
    assert_equal(weights(plain), want)
    with torch.no_grad():
        wrapped.eval()
        assert torch.equal(wrapped(batch(1, 0)[:, :8]), plain(batch(1, 0)[:, :8]))


def _values(rank: int, world: int) -> None:
    for check in (_gathered, _version, _moved, _loads, _saves):
        check(rank, world)


def test_whole_values_of_a_sharded_model() -> None:
    run(_values, 2)
