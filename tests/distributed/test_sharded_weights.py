"""A sharded weight answers for itself when it is read or written."""

from __future__ import annotations

import contextlib
import copy
import io
import os
import pickle
import signal
import time
from collections.abc import Callable

import pytest
import torch
from models import assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from sharded_models import WHOLE
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


def _forked(rank: int, world: int) -> None:
    """A child, as a DataLoader's worker, must not gather with its parent's peers."""
    model, wrapped = _sharded()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), torch.no_grad():
            try:
                wrapped(batch(0, 0)[:, :8])
            except RuntimeError as error:
                os._exit(7 if "is sharded" in str(error) else 8)
        os._exit(9)
    deadline = time.monotonic() + 10
    ended, status = os.waitpid(child, os.WNOHANG)
    while ended == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
        ended, status = os.waitpid(child, os.WNOHANG)
    if ended == 0:
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
    want = make_gpt()
    for m in (wrapped, want):
        loss_of(m, batch(0, rank)).backward()
    assert_equal(weights(model), weights(want))
    assert os.waitstatus_to_exitcode(status) == 7, "-9: it hung"


def _answers(rank: int, world: int) -> None:
    for check in (_metadata, _reads, _writes, _refusals, _forked):
        check(rank, world)


def test_reads_and_writes_of_a_sharded_weight() -> None:
    run(_answers, 2)
