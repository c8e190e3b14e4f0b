"""Models that are awkward to shard, at stages 0 to 3."""

from __future__ import annotations

import copy
import gc
import io
import weakref

import pytest
import torch
from models import Free, assert_close, assert_equal, batch, loss_of, make_gpt, weights
from ranks import run
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_torch as zero

STAGES = (0, 1, 2, 3)


def _reentrant(rank: int, world: int) -> None:
    for stage, reentrant in ((s, r) for s in STAGES for r in (True, False)):
        layer = nn.Linear(2, 2, bias=False)
        nn.init.ones_(layer.weight)
        opt = zero.ZeroOptimizer(layer, "sgd", stage=stage, lr=0.0)
        for _ in range(3):
            x = torch.ones(1, 2, requires_grad=True)
            inner = checkpoint(layer, x, use_reentrant=reentrant)
            checkpoint(layer, inner, use_reentrant=reentrant).sum().backward()
            assert zero.full_grad(layer.weight).tolist() == [[4.0, 4.0]] * 2, (stage, reentrant)
            opt.step()
            opt.zero_grad()
        # The first backward may have needed a second reduction; later ones not.
        if stage:
            before = zero.report(opt).as_dict()["traffic"]["reduce_scatter"]
            x = torch.ones(1, 2, requires_grad=True)
            inner = checkpoint(layer, x, use_reentrant=reentrant)
            checkpoint(layer, inner, use_reentrant=reentrant).sum().backward()
            sent = zero.report(opt).as_dict()["traffic"]["reduce_scatter"] - before
            assert sent == 64 * (world - 1)


def test_e81_checkpoints_of_both_kinds() -> None:
    run(_reentrant, 2)


def _checkpointed_blocks(rank: int, world: int) -> None:
    for stage, reentrant in ((s, r) for s in STAGES for r in (True, False)):
        model, plain = make_gpt(), make_gpt()
        opt = zero.ZeroOptimizer(
            model,
            stage=stage,
            lr=1e-2,
            bucket_bytes=4096,
            first_bucket_bytes=1024,
            min_unit_numel=0,
        )
        other = zero.ZeroOptimizer(
            plain,
            stage=stage,
            lr=1e-2,
            bucket_bytes=4096,
            first_bucket_bytes=1024,
            min_unit_numel=0,
        )
        for block in model.blocks:
            forward = block.forward
            block.forward = lambda x, f=forward, r=reentrant: checkpoint(f, x, use_reentrant=r)
        for step in range(3):
            for net, o in ((model, opt), (plain, other)):
                loss_of(net, batch(step, rank)).backward()
                o.step()
                o.zero_grad()
        assert_close(weights(model), weights(plain), rtol=1e-5, atol=1e-6)


def test_checkpointed_blocks_train_like_plain_ones() -> None:
    run(_checkpointed_blocks, 2)


def _double_backward(rank: int, world: int) -> None:
    for stage in STAGES:
        model = Free(w=torch.ones(()))
        w = model.w
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        x = torch.tensor(float(rank + 1), requires_grad=True)
        (slope,) = torch.autograd.grad(w * x * x, x, create_graph=True)
        (slope - 1).square().backward()
        assert zero.full_grad(w).item() == 14.0  # E83
        opt.zero_grad()
        y = (w * torch.tensor([1.0, 2.0])).sum()
        y.backward(retain_graph=True)
        y.backward()
        assert zero.full_grad(w).item() == 6.0  # E78


def test_e78_e83_retained_graphs_and_gradient_penalties() -> None:
    run(_double_backward, 2)


def _gan(rank: int, world: int) -> None:
    for stage in STAGES:
        generator, critic = Free(g=torch.tensor([2.0])), Free(d=torch.tensor([3.0]))
        g, d = generator.g, critic.d
        opt_g = zero.ZeroOptimizer(generator, "sgd", stage=stage, lr=0.1)
        opt_d = zero.ZeroOptimizer(critic, "sgd", stage=(stage + 1) % 4, lr=0.1)
        (d * (g * 1.0).detach()).sum().backward()
        assert g.grad is None and zero.full_grad(d).item() == 2.0
        opt_g.zero_grad()
        opt_d.zero_grad()
        (-d * (g * 1.0)).sum().backward()
        assert zero.full_grad(g).item() == -3.0 and zero.full_grad(d).item() == -2.0
        opt_g.step()
        assert zero.full_param(d).item() == 3.0
        assert abs(zero.full_param(g).item() - 2.3) < 1e-6


def test_e84_two_models_and_two_optimizers() -> None:
    run(_gan, 2)


def _heads_in_turn(rank: int, world: int) -> None:
    for stage in STAGES:
        trunk = nn.Linear(2, 2, bias=False)
        heads = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(2)])
        model = nn.ModuleList([trunk, heads])
        for p in model.parameters():
            nn.init.ones_(p)
        opt = zero.ZeroOptimizer(model, "sgd", stage=stage, lr=0.1, min_unit_numel=0)
        for step in range(4):
            opt.zero_grad()
            hidden = trunk(torch.ones(1, 2))
            outputs = [head(hidden) for head in heads]
            outputs[step % 2].sum().backward()
            if step == 3:
                torch.testing.assert_close(zero.full_grad(trunk.weight), torch.full((2, 2), 0.82))
                torch.testing.assert_close(
                    zero.full_grad(heads[1].weight), torch.full((1, 2), 1.44)
                )
                assert heads[0].weight.grad is None
            opt.step()


def test_e92_heads_trained_in_turn() -> None:
    run(_heads_in_turn, 2)


def _state_of_one_rank(rank: int, world: int) -> None:
    """Only the part of the bucket that rank 0 owns was ever stepped."""
    for stage in STAGES:
        model = Free(b=torch.ones(16), a=torch.ones(16))
        a, b = model.a, model.b
        opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1)
        a.sum().backward()
        opt.step()
        torch.testing.assert_close(zero.full_state(a)["exp_avg"], torch.full((16,), 0.1))
        assert zero.full_state(b) == {}
        assert list(opt.state_dict()["state"]) == [1]


def test_state_that_one_rank_holds_alone_is_made_whole() -> None:
    run(_state_of_one_rank, 2)


def _zero_grad_everywhere(rank: int, world: int) -> None:
    for stage in STAGES:
        for by in ("optimizer", "module", "wrapper"):
            for to_none in (True, False):
                model = nn.Linear(3, 3, bias=False)
                nn.init.ones_(model.weight)
                wrapper = zero.ZeroModule(model, stage=stage)
                opt = zero.ZeroOptimizer(wrapper, "sgd", lr=1.0, stage=stage)
                clear = {"optimizer": opt, "module": model, "wrapper": wrapper}[by]
                wrapper(torch.ones(1, 3)).sum().backward()
                clear.zero_grad(set_to_none=to_none)
                if to_none:
                    assert model.weight.grad is None
                else:
                    assert model.weight.grad.shape == (3, 3)
                    assert zero.full_grad(model.weight).abs().sum() == 0
                wrapper(torch.full((1, 3), 2.0)).sum().backward()
                assert zero.full_grad(model.weight).tolist() == [[2.0] * 3] * 3
                opt.step()
                assert zero.full_param(model.weight).tolist() == [[-1.0] * 3] * 3


def test_e98_zero_grad_of_each_object() -> None:
    run(_zero_grad_everywhere, 2)


def _after_step(rank: int, world: int) -> None:
    """Reads while the step's all-gather may still be in flight."""
    for stage in (1, 2):
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, bucket_bytes=2048)
        plain = make_gpt()
        other = zero.ZeroOptimizer(plain, stage=stage, lr=1e-2, bucket_bytes=2048)
        readers = [
            lambda: io.BytesIO() and torch.save(model.state_dict(), io.BytesIO()),
            lambda: copy.deepcopy(model),
            lambda: [p.detach().numpy() for p in model.parameters()],
            lambda: repr(model.head.weight),
            lambda: nn.utils.parameters_to_vector(model.parameters()),
        ]
        for step in range(10):
            for net, o in ((model, opt), (plain, other)):
                loss_of(net, batch(step, rank)).backward()
                o.step()
                o.zero_grad()
            readers[step % len(readers)]()
            other.synchronize()
        assert_equal(weights(model), weights(plain))
        loss_of(model, batch(99, rank)).backward()
        opt.step()
        with pytest.raises(RuntimeError, match=r"tokens\.weight.*synchronize"):
            model.tokens.weight.data_ptr()
        opt.synchronize()
        assert model.tokens.weight.data_ptr() != 0
        twin = copy.deepcopy(model)
        assert type(twin) is type(model)
        assert twin.tokens.weight.data_ptr() != model.tokens.weight.data_ptr()


def test_reads_after_a_step_wait_or_say_so() -> None:
    run(_after_step, 2)


def _collected(rank: int, world: int) -> None:
    for stage in STAGES:
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, min_unit_numel=0)
        loss_of(model, batch(0, rank)).backward()
        opt.step()
        watch = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
        del model, opt
        gc.collect()
        assert all(ref() is None for ref in watch), stage


def test_e34_nothing_keeps_a_dropped_model_alive() -> None:
    run(_collected, 2)


def _dropped_optimizer(rank: int, world: int) -> None:
    """A dropped optimizer leaves whole, plain parameters or a working module."""
    for stage in STAGES:
        model = make_gpt()
        opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, min_unit_numel=0)
        loss_of(model, batch(0, rank)).backward()
        opt.step()
        opt.zero_grad()
        want = weights(model)
        del opt
        gc.collect()
        assert_equal(weights(model), want)
        loss_of(model, batch(1, rank)).backward()
        if stage == 3:  # the parameters stay sharded until they are given back
            with torch.no_grad(), pytest.raises(RuntimeError, match=r"tokens\.weight.*sharded"):
                model.tokens.weight.sum().item()
            assert type(model.tokens.weight.grad).__name__ == "ShardedGradient"
            assert zero.unwrap(model) is model
            assert_equal(
                {name: p.detach() for name, p in model.named_parameters()},
                {name: want[name] for name, _ in model.named_parameters()},
            )
            model.zero_grad()
            loss_of(model, batch(1, rank)).backward()
        assert type(model.tokens.weight.grad) is torch.Tensor


def test_a_dropped_optimizer_leaves_usable_weights() -> None:
    run(_dropped_optimizer, 2)
