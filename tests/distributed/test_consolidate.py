"""Whole weights out of checkpoints, for plain torch, and the training that goes on."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
from checkpoint_cases import in_folder, make, train, whole
from models import GPT, Free, assert_equal, batch, loss_of, make_gpt
from ranks import at_each_stage, run
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn

import zero_torch as zero


def _barrier() -> None:
    if dist.is_initialized():
        dist.barrier()


def _half_trained(stage: int, rank: int, whole_bf16: bool) -> tuple[nn.Module, Any]:
    """In bf16, the first block frozen, a float buffer; some steps were taken."""
    model = make_gpt()
    model.blocks[0].requires_grad_(False)
    model.register_buffer("scale", torch.linspace(0, 1, 7))
    given: dict[str, Any] = {}
    if whole_bf16:
        model.bfloat16()
    else:
        given["param_dtype"] = torch.bfloat16
    opt = zero.ZeroOptimizer(model, stage=stage, lr=1e-2, min_unit_numel=0, timeout=30.0, **given)
    train(model, opt, rank, range(2))
    return model, opt


def _plain(seed: int) -> GPT:
    model = make_gpt(seed)
    model.register_buffer("scale", torch.zeros(7))
    return model


@in_folder
def _asked_dtypes(rank: int, world: int, stage: int, folder: str) -> None:
    """E49"""
    for whole_bf16 in (False, True):
        model, opt = _half_trained(stage, rank, whole_bf16)
        masters = {name: zero.full_param(p) for name, p in model.named_parameters()}
        zero.save(f"{folder}/saved", model, opt)
        if rank == 0:
            frozen = {f"blocks.0.{n}": p for n, p in make_gpt().blocks[0].named_parameters()}
            kept = torch.bfloat16 if whole_bf16 else torch.float32  # without and with masters
            assert masters["norm.weight"].dtype == kept
            for dtype in (None, torch.float32, torch.bfloat16):
                file = f"{folder}/model.safetensors"
                assert zero.consolidate(f"{folder}/saved", file, dtype=dtype) == [file]
                found = load_file(file)
                assert dtype is None or {value.dtype for value in found.values()} == {dtype}
                assert found.keys() == _plain(0).state_dict().keys()
                for name, value in found.items():
                    if name in frozen:
                        given = frozen[name].bfloat16()  # what computes: it has no master
                    elif name == "scale":
                        given = torch.linspace(0, 1, 7)
                        given = given.bfloat16() if whole_bf16 else given
                    else:
                        given = masters["tokens.weight" if name == "head.weight" else name]
                    assert torch.equal(value, given.to(value.dtype)), name
                plain = _plain(1)
                plain.load_state_dict(found, strict=True)
                assert torch.isfinite(loss_of(plain, batch(0, 0)))
        _barrier()


@in_folder
def _export_and_go_on(rank: int, world: int, stage: int, folder: str) -> None:
    """E55"""
    model, opt = make(stage, param_dtype=torch.bfloat16)
    reference, reference_opt = make(stage, param_dtype=torch.bfloat16)
    for net, optimizer in ((model, opt), (reference, reference_opt)):
        train(net, optimizer, rank, range(2))
    before = whole(model, opt)
    for round_ in range(2):
        zero.save(f"{folder}/saved", model, opt)
        if rank == 0:
            file = f"{folder}/model-{round_}.safetensors"
            zero.consolidate(f"{folder}/saved", file)
            one = load_file(file)
            paths = zero.consolidate(f"{folder}/saved", file, max_file_bytes=1000)
            assert not os.path.exists(file)
            with open(paths.pop()) as index:
                told = json.load(index)
            parts: dict[str, torch.Tensor] = {}
            for path in paths:
                part = load_file(path)
                assert len(part) == 1 or sum(value.nbytes for value in part.values()) <= 1000
                assert all(told["weight_map"][name] == os.path.basename(path) for name in part)
                parts |= part
            assert told["metadata"]["total_size"] == sum(v.nbytes for v in parts.values())
            assert len(paths) > 5 and one.keys() == parts.keys() == told["weight_map"].keys()
            for name, value in one.items():
                live = before["tokens.weight" if name == "head.weight" else name]
                assert torch.equal(value, live) and torch.equal(parts[name], live), name
                assert value.abs().sum() > 0, name
        _barrier()
        assert_equal(whole(model, opt), before)
    for net, optimizer in ((model, opt), (reference, reference_opt)):
        train(net, optimizer, rank, range(2, 4))
    assert_equal(whole(model, opt), whole(reference, reference_opt))


def test_e49_e55_exports() -> None:
    run(at_each_stage, 2, _asked_dtypes, _export_and_go_on, limit_s=180.0)


class Tied(nn.Module):
    """Modules, parameters and buffers under two names; one parameter lies transposed in memory."""

    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(35.0).view(5, 7).t() + value)
        self.norm = nn.BatchNorm1d(3)
        self.same = self.norm
        self.layer = nn.Linear(3, 3)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = self.layer.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@in_folder
def _ties_and_orders(rank: int, world: int, stage: int, folder: str) -> None:
    torch.manual_seed(0)
    model = Tied(0.5)
    model.norm.running_mean.fill_(3.0)
    want = {name: value.clone() for name, value in model.state_dict().items()}
    zero.save(f"{folder}/saved", model, zero.ZeroOptimizer(model, stage=stage, lr=0.1))
    if rank == 0:
        file = f"{folder}/model.safetensors"
        zero.consolidate(f"{folder}/saved", file)
        found = load_file(file)
        assert_equal(found, want)
        fresh = Tied()
        fresh.load_state_dict(found, strict=True)
        assert fresh.turned.stride() == (1, 7) and fresh.other.weight is fresh.layer.weight
        assert_equal(fresh.state_dict(), want)
        zero.consolidate(f"{folder}/saved", file, tied=False)
        once = load_file(file)
        assert set(want) - set(once) == {"other.weight"} | {n for n in want if "same" in n}
    _barrier()


@in_folder
def _no_placeholders(rank: int, world: int, stage: int, folder: str) -> None:
    """E50"""
    want = make_gpt().state_dict()
    wrapper = zero.ZeroModule(make_gpt(), stage=stage, min_unit_numel=0, timeout=30.0)
    block = {key.removeprefix("blocks.1."): v for key, v in want.items() if "blocks.1." in key}
    for part, expected in ((wrapper, want), (wrapper.module, want), (wrapper.blocks[1], block)):
        file = io.BytesIO()
        torch.save(part.state_dict(), file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        assert_equal(saved, expected)
        plain: nn.Module = make_gpt(1)
        if expected is block:
            plain = plain.blocks[0]
        plain.load_state_dict(saved, strict=True)
        assert_equal(plain.state_dict(), expected)
        path = f"{folder}/{rank}.safetensors"
        save_model(part, path)  # type: ignore[arg-type]
        load_model(plain, path, strict=True)
        assert_equal(plain.state_dict(), expected)
        save_file({key: value.clone() for key, value in part.state_dict().items()}, path)
        assert_equal(load_file(path), expected)
    _barrier()


def test_e50_ties_and_orders() -> None:
    run(at_each_stage, 2, _ties_and_orders, _no_placeholders, limit_s=120.0)


PEAK = """
import resource, sys
import zero_torch as zero
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
zero.consolidate(sys.argv[1] + "/small", sys.argv[1] + "/small.safetensors", dtype=torch.bfloat16)
before = peak()
zero.consolidate(sys.argv[1] + "/large", sys.argv[1] + "/large.safetensors", dtype=torch.bfloat16)
print(peak() - before)
"""


def test_memory_is_a_block(tmp_path: Any) -> None:
    """And not the tensor of 96 MB."""
    for name, size in (("small", 1 << 22), ("large", 24 << 20)):
        zero.save(tmp_path / name, Free(w=torch.ones(size)))
    done = subprocess.run(
        [sys.executable, "-c", "import torch" + PEAK, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert int(done.stdout) < 8 << 20
    assert load_file(tmp_path / "large.safetensors")["w"].eq(1).all()


def test_what_is_refused(tmp_path: Any) -> None:
    model = make_gpt()
    zero.save(tmp_path / "saved", model)
    file = tmp_path / "model.safetensors"
    with pytest.raises(ValueError, match="max_file_bytes"):
        zero.consolidate(tmp_path / "saved", file, max_file_bytes=0)
    with pytest.raises(TypeError, match="dtype"):
        zero.consolidate(tmp_path / "saved", file, dtype="float32")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="floating"):
        zero.consolidate(tmp_path / "saved", file, dtype=torch.int32)
    with pytest.raises(ValueError, match="outside of the checkpoint"):
        zero.consolidate(tmp_path / "saved", tmp_path / "saved" / "model.safetensors")
    (data,) = (tmp_path / "saved").glob("*.safetensors")
    before = data.read_bytes()
    data.write_bytes(before[:-3] + bytes([before[-3] ^ 1]) + before[-2:])
    file.write_text("old")
    with pytest.raises(ValueError, match=f"{data.name}.*is damaged"):
        zero.consolidate(tmp_path / "saved", file)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["model.safetensors", "saved"]
    assert file.read_text() == "old"
    zero.consolidate(tmp_path / "saved", file, verify=False)
    assert load_file(file).keys() == model.state_dict().keys()
