"""A sharded weight answers for itself: reads, writes, loads, state dicts and its life's end."""

from __future__ import annotations

import copy
import gc
import io
import os
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from sharded_models import WHOLE, square_layers
from torch import nn

import zero_torch as zero

NAME = "blocks.1.up.weight"
SHARDED = r"parameter 'blocks\.1\.up\.weight' is sharded \(rank \d of 2\)"
LOST = r"'blocks\.1\.up\.weight'.*would be lost.*writeback=True"


def _sharded(**settings: object) -> tuple[nn.Module, zero.ZeroModule]:
    model = make_gpt()
    return model, zero.ZeroModule(model, stage=3, **WHOLE, **settings)


def _gathers(wrapped: object) -> int:
    return zero.report(wrapped).as_dict()["traffic"]["all_gather"]


def _metadata(rank: int, world: int) -> None:
    plain = make_gpt()
    want = {
        n: (p.shape, p.dtype, p.stride(), p.device, p.requires_grad)
        for n, p in plain.named_parameters()
    }
    model = make_gpt()
    ids = {n: id(p) for n, p in model.named_parameters()}
    opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)

    def look() -> None:
        assert {n: id(p) for n, p in model.named_parameters()} == ids
        got = {
            n: (p.shape, p.dtype, p.stride(), p.device, p.requires_grad)
            for n, p in model.named_parameters()
        }
        assert got == want
        assert all(type(p) is nn.Parameter and p.is_leaf for p in model.parameters())
        assert model.head.weight is model.tokens.weight

    look()
    for step in range(3):
        loss = loss_of(model, batch(step, rank))
        look()
        loss.backward()
        look()
        assert all(p.grad.shape == p.shape for p in model.parameters())
        opt.step()
        look()
        opt.zero_grad()
    p = model.get_parameter(NAME)
    before = _gathers(opt)
    views: list[Callable[[], torch.Tensor]] = [
        p.detach,
        p.t,
        lambda: p.view(-1),
        lambda: p[1:],
        lambda: p.unsqueeze(0).expand(3, -1, -1),
        lambda: torch.empty_like(p),
        lambda: torch.zeros_like(p),
        lambda: p.data,
        lambda: p.chunk(2)[0],
        lambda: p.flatten(),
        lambda: p.detach().t_(),
        lambda: p.detach().unsqueeze_(0).squeeze_(0),
        lambda: p.detach().transpose_(0, 1),
        lambda: p.detach().as_strided_((3,), (1,)),
    ]
    for view in views:  # with grad mode and without
        assert view().numel() > 0
        with torch.no_grad():
            assert view().numel() > 0
    assert _gathers(opt) == before


def _reads(rank: int, world: int) -> None:
    model, _ = _sharded()
    p = model.get_parameter(NAME)
    if rank == 1:  # one rank alone: never a collective
        reads: list[Callable[[], object]] = [
            lambda: p.sum().item(),
            lambda: p + 1,
            p.tolist,
            lambda: p.detach().numpy(),
            p.data_ptr,
            lambda: p[0, 0].item(),
            lambda: torch.equal(p, p),
            lambda: copy.deepcopy(p),
            lambda: torch.save(p, io.BytesIO()),
            lambda: repr(p),
            lambda: str(p.data),
            lambda: torch.cat([p, p]),
            lambda: nn.utils.parameters_to_vector(model.blocks[1].parameters()),
            lambda: p.detach().t().contiguous(),
            lambda: p.clone(),
            lambda: p.to(torch.float64),
        ]
        for i, read in enumerate(reads):
            with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match="is sharded"):
                pytest.fail(f"read {i} gave {read()}")
        with torch.inference_mode(), pytest.raises(RuntimeError, match=SHARDED):
            p.norm()
    # With grad mode on, an operation gathers: outside any forward, on all ranks.
    want = make_gpt().get_parameter(NAME)
    assert torch.equal((p * 2).detach(), (want * 2).detach())
    (p * p).sum().backward()
    torch.testing.assert_close(zero.full_grad(p), 2 * want.detach())
    with torch.no_grad(), pytest.raises(RuntimeError, match=SHARDED):
        p.sum()


def _writes_by(p: nn.Parameter) -> list[Callable[[], object]]:
    other = torch.full(p.shape, 7.0)
    state = torch.optim.SGD([p], lr=0.1)
    many = torch.optim.AdamW([p], lr=0.1, foreach=True)
    fused = torch.optim.AdamW([p], lr=0.1, fused=True)

    def step(optimizer: torch.optim.Optimizer) -> None:
        kept, p.grad = p.grad, torch.ones(p.shape)
        try:
            optimizer.step()
        finally:
            p.grad = kept

    return [
        lambda: p.data.zero_(),
        lambda: p.zero_(),
        lambda: p.copy_(other),
        lambda: p.data.copy_(other),
        lambda: p.detach().add_(1),
        lambda: p.data.t().mul_(2),
        lambda: p.data[0].fill_(3),
        lambda: p.__setitem__(0, 1.0),
        lambda: nn.init.ones_(p),
        lambda: nn.init.kaiming_uniform_(p),
        lambda: nn.init.trunc_normal_(p),
        lambda: torch._foreach_add_([p], 1.0),
        lambda: torch._foreach_copy_([p], [other]),
        lambda: torch.add(other, other, out=p.data),
        lambda: p.data.index_add_(0, torch.tensor([0]), torch.ones(1, p.shape[1])),
        lambda: torch.nn.utils.vector_to_parameters(other.flatten().clone(), [p]) or p.zero_(),
        lambda: step(state),
        lambda: step(many),
        lambda: step(fused),
    ]


def _writes(rank: int, world: int) -> None:
    want = make_gpt().state_dict()
    count = len(_writes_by(nn.Parameter(torch.ones(2, 2))))
    for how in ("sharded", "gathered", "forward", "unsharded"):
        model, wrapped = _sharded()
        p = model.get_parameter(NAME)
        for index in range(count):
            write = _writes_by(p)[index]

            def refused(write: Callable[[], object] = write) -> None:
                with torch.no_grad(), pytest.raises(RuntimeError, match="sharded"):
                    write()

            if index == 15:
                continue  # sets .data: the values are taken, see _moved
            if how == "sharded":
                refused()
            elif how == "gathered":
                with zero.gathered(model.blocks[1]):
                    refused()
            elif how == "unsharded":
                wrapped.unshard()
                refused()
                wrapped.reshard()
            else:
                hook = model.blocks[1].up.register_forward_pre_hook(lambda *_, r=refused: r())
                with torch.no_grad():
                    loss_of(wrapped, batch(0, rank))
                hook.remove()
            got = wrapped.state_dict()
            assert torch.equal(got[NAME], want[NAME]), (how, index)
        assert_equal(weights(model), weights(make_gpt()))
        assert loss_of(wrapped, batch(0, rank)).item() == loss_of(make_gpt(), batch(0, rank)).item()


def _refusals(rank: int, world: int) -> None:
    model, wrapped = _sharded()
    opt = zero.ZeroOptimizer(wrapped, lr=1e-2)
    for refused in (copy.deepcopy, pickle.dumps, lambda m: torch.save(m, io.BytesIO())):
        for target in (model, wrapped, model.blocks[0]):
            with pytest.raises(TypeError, match=r"sharded at stage 3.*state_dict"):
                refused(target)
    layer = model.blocks[0].up  # no unit: a copy is a plain layer
    for copied in (copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))):
        with torch.no_grad(), pytest.raises(RuntimeError, match="is sharded"):
            copied(layer)
        with torch.no_grad(), zero.gathered(layer):
            twin = copied(layer)
            assert torch.equal(twin.weight, layer.weight)
        twin.load_state_dict(twin.state_dict())
        twin(torch.ones(1, 11)).sum().backward()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
    loss_of(wrapped, batch(0, rank)).backward()
    with zero.gathered(model), pytest.raises(RuntimeError, match=r"held whole.*step outside"):
        opt.step()
    opt.step()
    with pytest.raises(ValueError, match="managed already"):
        zero.ZeroOptimizer(model, stage=3)
    with pytest.raises(TypeError, match=r"expected an nn\.Module at stage 3"):
        zero.ZeroOptimizer([nn.Parameter(torch.ones(3))], stage=3)


def _answers(rank: int, world: int) -> None:
    for check in (_metadata, _reads, _writes, _refusals):
        check(rank, world)


def test_reads_and_writes_of_a_sharded_weight() -> None:
    run(_answers, 2)


def _plain_again(rank: int, world: int) -> None:
    hooks = (
        "_forward_pre_hooks",
        "_forward_hooks",
        "_state_dict_hooks",
        "_forward_hooks_with_kwargs",
    )
    more = ("_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
    tables = (*hooks, *more, "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")

    def counts(model: nn.Module) -> dict[str, int]:
        return {
            f"{name}.{table}": len(getattr(part, table))
            for name, part in model.named_modules()
            for table in tables
        }

    for how in ("unwrap", "unwrap the wrapper", "release"):
        model = make_gpt()
        before = counts(model)
        if how == "release":
            opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)
            called = model
        else:
            called = zero.ZeroModule(model, stage=3, **WHOLE)
            opt = zero.ZeroOptimizer(called, lr=1e-2)
        for step in range(2):
            loss_of(called, batch(step, rank)).backward()
            opt.step()
            opt.zero_grad()
        want = weights(model)
        assert counts(model) != before
        if how == "release":
            opt.release()
        else:
            assert zero.unwrap(called if how == "unwrap the wrapper" else model) is model
        assert counts(model) == before
        with torch.no_grad():
            assert_equal({n: p.clone() for n, p in model.state_dict().items()}, want)
            model.head.weight.mul_(1.0)
        twin = copy.deepcopy(model)
        sgd, other = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, twin))
        for m, o in ((model, sgd), (twin, other)):
            for _ in range(2):
                loss_of(m, batch(7, rank)).backward()
                o.step()
                o.zero_grad()
        assert_equal(weights(model), weights(twin))
        again = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)  # and sharded anew
        loss_of(model, batch(0, rank)).backward()
        again.step()
        again.release()


def _inference(rank: int, world: int) -> None:
    class Generator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = make_gpt()

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.gpt(tokens)

        @torch.no_grad()
        def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
            for _ in range(count):
                tokens = torch.cat([tokens, self.gpt(tokens)[:, -1:].argmax(-1)], 1)
            return tokens

        @torch.no_grad()
        def norm(self) -> float:
            return float(self.gpt.head.weight.norm())  # no forward at all

    plain = Generator()
    wrapped = zero.ZeroModule(Generator(), stage=3, **WHOLE)
    tokens = batch(0, 0)[:, :3]
    assert torch.equal(wrapped.generate(tokens, 4), plain.generate(tokens, 4))
    assert wrapped.norm() == plain.norm()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(wrapped(tokens), plain(tokens))
    assert _gathers(wrapped) > 0
    wrapped.unshard()
    before = _gathers(wrapped)
    for _ in range(2):
        wrapped.generate(tokens, 4)
        wrapped(tokens).sum().backward()
    with torch.no_grad():
        assert torch.equal(wrapped.module.gpt.head.weight.sum(), plain.gpt.head.weight.sum())
    assert _gathers(wrapped) == before
    wrapped.unshard()
    wrapped.reshard()
    with torch.no_grad(), pytest.raises(RuntimeError, match="is sharded"):
        wrapped.module.gpt.head.weight.sum()
    wrapped(tokens)
    assert _gathers(wrapped) > before
    wrapped.reshard()


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _lifetime(rank: int, world: int) -> None:
    sizes = []
    for round_ in range(14):
        model = square_layers(8, 256)
        wrapped = zero.ZeroModule(model, stage=3)
        opt = zero.ZeroOptimizer(wrapped, lr=1e-3)
        for _ in range(2):
            wrapped(torch.ones(2, 256)).sum().backward()
            opt.step()
        if round_ % 2 == 0:
            opt.zero_grad()
        watch = [weakref.ref(o) for o in (model, wrapped, opt, *model.parameters())]
        del model, wrapped, opt
        gc.collect()
        assert all(ref() is None for ref in watch), round_
        sizes.append(_resident())
    grown = sizes[-1] - sizes[3]
    assert grown < 8 * 256 * 256 * 4, [s >> 10 for s in sizes]  # less than one model in ten rounds


def _optimizers_come_and_go(rank: int, world: int) -> None:
    model, wrapped = _sharded()
    plain = make_gpt()
    for round_ in range(3):
        opt = zero.ZeroOptimizer(wrapped, "sgd", lr=0.1)
        other = zero.ZeroOptimizer(plain, "sgd", stage=0, lr=0.1)
        for m, o in ((wrapped, opt), (plain, other)):
            loss_of(m, batch(round_, rank)).backward()
            o.step()
            o.zero_grad()
        with pytest.raises(ValueError, match="has an optimizer already"):
            zero.ZeroOptimizer(wrapped, "sgd", lr=0.1)
        del opt, o, other
        gc.collect()
        assert_equal(weights(model), weights(plain))
        with torch.no_grad():  # sharded still, and working
            assert torch.equal(wrapped(batch(9, 0)[:, :8]), plain(batch(9, 0)[:, :8]))
            with pytest.raises(RuntimeError, match="is sharded"):
                model.head.weight.sum()
    # Without a ZeroModule the model's hooks own the engine.
    model = make_gpt()
    opt = zero.ZeroOptimizer(model, stage=3, lr=1e-2, **WHOLE)
    del opt
    gc.collect()
    assert_equal(weights(model), weights(make_gpt()))
    assert loss_of(model, batch(0, rank)).item() == loss_of(make_gpt(), batch(0, rank)).item()


def _lives(rank: int, world: int) -> None:
    for check in (_plain_again, _inference, _optimizers_come_and_go, _lifetime):
        check(rank, world)


def test_the_life_of_a_sharded_module() -> None:
    run(_lives, 2)
