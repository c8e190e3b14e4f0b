"""A module sharded at stage 3 in the contexts that plain modules work in: one process, one rank."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, jacrev, jvp, vmap

import zero_torch as zero

X = torch.linspace(-1, 1, 12).view(3, 4)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Linear(4, 2))


def sharded(model: nn.Module | None = None) -> zero.ZeroModule:
    return zero.ZeroModule(make() if model is None else model, stage=3, min_unit_numel=0)


def is_whole(parameter: torch.Tensor) -> bool:
    try:
        return parameter.data_ptr() != 0
    except RuntimeError:
        return False


def whole(module: nn.Module) -> list[str]:
    return [name for name, parameter in module.named_parameters() if is_whole(parameter)]


def trains_alike(*pairs: tuple[nn.Module, zero.ZeroOptimizer]) -> None:
    """A step of the sharded module, then of the plain one, gives the same bits."""
    for model, optimizer in pairs:
        model(X).sum().backward()
        optimizer.step()
    (ours, _), (plain, _) = pairs
    assert whole(ours) == []
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        assert torch.equal(zero.full_param(a), b)


TRANSFORMS: dict[str, Callable[[nn.Module], object]] = {
    "grad": lambda m: grad(lambda x: m(x).sum())(X),
    "vmap": lambda m: vmap(m)(X).detach(),
    "vmap of grad": lambda m: vmap(grad(lambda x: m(x).sum()))(X),
    "jacrev": lambda m: jacrev(m)(X[0]).detach(),
    "jvp": lambda m: jvp(m, (X,), (X,))[1].detach(),
    "grad of parameters": lambda m: list(
        grad(lambda p: functional_call(m, p, (X,)).sum())(dict(m.named_parameters())).values()
    ),
    "other parameters": lambda m: functional_call(
        m, {n: p * 2 for n, p in make().named_parameters()}, (X,)
    ).detach(),
    "autograd.functional": lambda m: torch.autograd.functional.jacobian(m, X),
    "autograd.grad": lambda m: list(torch.autograd.grad(m(X).sum(), list(m.parameters()))),
    "inference_mode": torch.inference_mode()(lambda m: m(X)),
}


@pytest.mark.parametrize("name", list(TRANSFORMS))
def test_transforms_give_what_they_give_on_a_plain_module(name: str) -> None:
    ours = make()
    wrapped = sharded(ours)
    got, want = TRANSFORMS[name](ours), TRANSFORMS[name](make())
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    wrapped(X).sum().backward()  # and it still trains
    assert whole(ours) == []


class Interrupt(BaseException):
    """As KeyboardInterrupt: torch calls no forward hook for it."""


@pytest.mark.parametrize("error", [ValueError, Interrupt])
@pytest.mark.parametrize("at", [0, 2, 3])
def test_a_forward_that_fails_leaves_a_module_that_trains(
    at: int, error: type[BaseException]
) -> None:
    def fail(*_: object) -> None:
        raise error

    ours, plain = make(), make()
    opt = zero.ZeroOptimizer(ours, stage=3, lr=0.1, min_unit_numel=0)
    other = zero.ZeroOptimizer(plain, stage=0, lr=0.1)
    handle = ours[at].register_forward_pre_hook(fail)
    with pytest.raises(error):
        ours(X)
    handle.remove()
    trains_alike((ours, opt), (plain, other))


def test_a_backward_that_fails_leaves_a_module_that_trains() -> None:
    def fail(_: torch.Tensor) -> None:
        raise ValueError("half way")

    ours, plain = make(), make()
    opt = zero.ZeroOptimizer(ours, stage=3, lr=0.1, min_unit_numel=0)
    other = zero.ZeroOptimizer(plain, stage=0, lr=0.1)
    handle = ours[0].weight.register_hook(fail)
    with pytest.raises(ValueError, match="half way"):
        ours(X).sum().backward()
    handle.remove()
    opt.zero_grad()
    trains_alike((ours, opt), (plain, other))


def test_forward_in_another_thread() -> None:
    wrapped, results = sharded(), []
    for _ in range(3):
        thread = threading.Thread(target=lambda: results.append(wrapped(X)))
        thread.start()
        thread.join()
        assert torch.equal(results[-1], make()(X))
        results[-1].sum().backward()
    assert whole(wrapped.module) == []


def test_state_dicts_and_edits_inside_forward() -> None:
    ours, want = make(), make().state_dict()
    wrapped, found = sharded(ours), []
    handle = ours[2].register_forward_pre_hook(lambda *_: found.append(ours.state_dict()))
    wrapped(X).sum().backward()
    handle.remove()
    assert all(torch.equal(found[0][name], want[name]) for name in want)

    def edit(*_: object) -> None:
        with zero.gathered(ours, writeback=True), torch.no_grad():
            ours[3].weight.fill_(2)

    handle = ours[2].register_forward_pre_hook(edit)
    result = wrapped(X)
    handle.remove()
    plain = make()
    nn.init.constant_(plain[3].weight, 2)
    assert torch.equal(result, plain(X))


def test_conversions_are_no_ops_or_errors_with_a_name() -> None:
    ours = make()
    wrapped = sharded(ours)
    wrapped.to("cpu")
    wrapped.float()
    assert torch.equal(wrapped(X), make()(X))
    with pytest.raises(RuntimeError, match=r"parameter '0\.weight' is sharded"):
        wrapped.double()
    assert torch.equal(wrapped(X), make()(X))


@pytest.mark.parametrize(
    "kind", ["lstm", "weight_norm", "attention", "embedding_bag", "batch_norm"]
)
def test_modules_that_use_their_parameters_in_their_own_way(kind: str) -> None:
    torch.manual_seed(0)
    makers: dict[str, Callable[[], tuple[nn.Module, tuple]]] = {
        "lstm": lambda: (nn.LSTM(4, 5, 2, batch_first=True), (torch.randn(2, 3, 4),)),
        "weight_norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), (X,)),
        "attention": lambda: (
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True),
            (torch.randn(2, 3, 4),),
        ),
        "embedding_bag": lambda: (nn.EmbeddingBag(9, 4), (torch.randint(0, 9, (3, 4)),)),
        "batch_norm": lambda: (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), (X,)),
    }
    plain, inputs = makers[kind]()
    ours = copy.deepcopy(plain)
    wrapped = sharded(ours)
    for train in (True, False, True):
        results = []
        for module, called in ((ours, wrapped), (plain, plain)):
            module.train(train)
            result = called(*inputs)
            results.append(result[0] if isinstance(result, tuple) else result)
            F.mse_loss(results[-1], torch.ones_like(results[-1])).backward()
        assert torch.equal(*results)
        with torch.no_grad():
            assert torch.equal(
                *(r[0] if isinstance(r, tuple) else r for r in (wrapped(*inputs), plain(*inputs)))
            )
    for a, b in zip(ours.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(zero.full_grad(a), b.grad)


def test_unwrapping_leaves_no_memory_behind() -> None:
    wrapped = sharded()
    wrapped(X).sum().backward()
    for _ in range(2):
        zero.unwrap(wrapped)
        assert set(zero.report(wrapped).as_dict()["held"].values()) == {0}
        assert torch.equal(wrapped(X), make()(X))


@pytest.mark.parametrize("whole_model", [True, False])
def test_compiled_models_train_like_plain_ones(whole_model: bool) -> None:
    plain, model = make(), make()
    opt = zero.ZeroOptimizer(model, "sgd", stage=3, lr=0.1, min_unit_numel=0)
    reference = torch.optim.SGD(plain.parameters(), lr=0.1)
    if whole_model:
        forward = torch.compile(model, backend="aot_eager")
    else:
        forward = model
        for layer in model:
            layer.compile(backend="aot_eager")
    for _ in range(3):
        for f, o in ((forward, opt), (plain, reference)):
            f(X).square().sum().backward()
            o.step()
            o.zero_grad()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name])
