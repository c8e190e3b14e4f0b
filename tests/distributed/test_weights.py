"""Weights that others wrote, loaded into sharded models: exactly, or with an error on all ranks."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_cases import SMALL, in_folder, make, train
from models import assert_equal, batch, loss_of, make_gpt
from ranks import at_each_stage, run
from safetensors.torch import save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

import zero_torch as zero

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
DCP = ("dcp", "dcp-nested", "dcp-app")
KINDS = ("torch", "nested", "safetensors", "once", "index", "folder", *DCP)


def _write(folder: str, model: nn.Module) -> dict[str, str]:
    """Each kind of file, by the tools that users have; paths by kind."""
    values = model.state_dict()
    single = {key: value.clone() for key, value in values.items()}
    paths = {kind: f"{folder}/{kind}" for kind in KINDS}
    torch.save(values, paths["torch"])
    torch.save({"model": values, "epoch": 3}, paths["nested"])
    save_file(single, paths["safetensors"])
    save_model(model, paths["once"])
    Path(paths["folder"]).mkdir()
    names = sorted(single)
    half = len(names) // 2
    save_file({n: single[n] for n in names[:half]}, f"{folder}/folder/m-00001-of-00002.safetensors")
    save_file({n: single[n] for n in names[half:]}, f"{folder}/folder/m-00002-of-00002.safetensors")
    places = {n: f"m-0000{1 + (at >= half)}-of-00002.safetensors" for at, n in enumerate(names)}
    paths["index"] = f"{folder}/folder/m.safetensors.index.json"
    text = str({"metadata": {}, "weight_map": places}).replace("'", '"')
    Path(paths["index"]).write_text(text)
    Path(f"{folder}/folder/other.safetensors").write_text("no part of it")
    for kind, state in (
        ("dcp", values),
        ("dcp-nested", {"model": values, "optimizer": {"state": {}}, "step": 3}),
        ("dcp-app", {"app": {"model": values, "optim": {"x": torch.ones(2)}}}),
    ):
        dcp.save(dict(state), checkpoint_id=paths[kind], no_dist=True)
    return paths


def _shared_paths(rank: int, folder: str, model: nn.Module) -> dict[str, str]:
    paths: list[Any] = [_write(folder, model) if rank == 0 else None]
    dist.broadcast_object_list(paths, 0)
    return dict(paths[0])


@in_folder
def _exact(rank: int, world: int, stage: int, folder: str) -> None:
    source = make_gpt(3)
    want = source.state_dict()
    for kind, path in _shared_paths(rank, folder, source).items():
        if stage != 3 and kind not in ("torch", "safetensors", "dcp"):
            continue
        for given in ({}, {"param_dtype": torch.bfloat16}):
            model, opt = make(stage, **given)
            train(model, opt, rank, range(1))
            state = opt.state_dict()["state"]
            assert zero.load(path, model) is None
            for name, parameter in model.named_parameters():
                assert torch.equal(zero.full_param(parameter), want[name]), f"{kind}: {name}"
                with zero.gathered(parameter):
                    rounded = want[name].to(parameter.dtype)
                    assert torch.equal(parameter.detach(), rounded), f"{kind}: {name}"
            for key, values in opt.state_dict()["state"].items():
                assert_equal(values, state[key])
    # And on as one that began with these values.
    for given in ({}, {"param_dtype": torch.bfloat16}):
        model, opt = make(stage, **given)
        zero.load(f"{folder}/torch", model)
        other = make_gpt(3)
        other_opt = zero.ZeroOptimizer(
            other, "adamw", stage=stage, lr=1e-2, timeout=30.0, **SMALL, **given
        )
        for net, optimizer in ((model, opt), (other, other_opt)):
            train(net, optimizer, rank, range(2))
        assert_equal(
            zero.state_dict(model, rank0_only=False), zero.state_dict(other, rank0_only=False)
        )


def test_each_kind_is_loaded_exactly() -> None:
    run(at_each_stage, 2, _exact, limit_s=200.0)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.arange(15.0).view(3, 5).t())
        self.frozen = nn.Parameter(torch.arange(3.0), requires_grad=False)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


@in_folder
def _errors(rank: int, world: int, stage: int, folder: str) -> None:
    source = Buffered()
    source.norm.running_mean.fill_(2.0)
    with torch.no_grad():
        source.turned.mul_(-1)
    values = {key: value.detach().contiguous() for key, value in source.state_dict().items()}
    bad = dict(values, extra=torch.ones(1), frozen=torch.ones(4))
    del bad["turned"]
    if rank == 0:
        save_file(values, f"{folder}/good.safetensors")
        save_file(bad, f"{folder}/bad.safetensors")
        torch.save([1, 2], f"{folder}/list.pt")
        torch.save({"a": torch.ones(2), "b": 3}, f"{folder}/number.pt")
        Path(f"{folder}/text.pt").write_text("no tensors")
        Path(f"{folder}/cut.safetensors").write_bytes(
            Path(f"{folder}/good.safetensors").read_bytes()[:-1]
        )
        whole = Path(f"{folder}/list.pt").read_bytes()
        Path(f"{folder}/cut.pt").write_bytes(whole[: len(whole) // 2])
        Path(f"{folder}/empty").mkdir()
        Path(f"{folder}/m.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../good.safetensors"}}'
        )
    dist.barrier()
    model = Buffered()
    opt = zero.ZeroOptimizer(model, stage=stage, lr=0.1, timeout=30.0)
    before = zero.state_dict(model, rank0_only=False)
    before = {key: value.clone() for key, value in before.items()}
    every = r"missing: 'turned'; unexpected: 'extra'; other shapes: 'frozen' \[4\] instead of \[3\]"
    with pytest.raises(ValueError, match=every):
        zero.load(f"{folder}/bad.safetensors", model)
    for name in ("list.pt", "number.pt", "text.pt", "cut.safetensors", "cut.pt"):
        with pytest.raises(ValueError, match=name):
            zero.load(f"{folder}/{name}", model)
    with pytest.raises(ValueError, match="beside it"):
        zero.load(f"{folder}/m.safetensors.index.json", model)
    with pytest.raises(ValueError, match="manifest"):
        zero.load(f"{folder}/empty", model)
    with pytest.raises(ValueError, match="leave opt out"):
        zero.load(f"{folder}/good.safetensors", model, opt)
    # Another file on one rank, and none.
    own = f"{folder}/{'bad' if rank == 1 else 'good'}.safetensors"
    with pytest.raises((ValueError, RuntimeError), match="on rank 1"):
        zero.load(own, model)
    own = f"{folder}/{'list.pt' if rank == 1 else 'good.safetensors'}"
    with pytest.raises((ValueError, RuntimeError), match=r"on rank 1.*list\.pt|^expected a state"):
        zero.load(own, model)
    if rank == 0:
        shutil.copy(f"{folder}/good.safetensors", f"{folder}/0.safetensors")
    with pytest.raises((ValueError, RuntimeError), match=r"no directory|on rank 1"):
        zero.load(f"{folder}/{rank}.safetensors", model)
    assert_equal(zero.state_dict(model, rank0_only=False), before)
    zero.load(f"{folder}/good.safetensors", model)
    assert_equal(zero.state_dict(model, rank0_only=False), values)
    del bad["frozen"]
    if rank == 0:
        save_file({**bad, "norm.weight": torch.full((4,), 9.0)}, f"{folder}/some.safetensors")
    dist.barrier()
    zero.load(f"{folder}/some.safetensors", model, strict=False)
    want = {**values, "norm.weight": torch.full((4,), 9.0)}
    assert_equal(zero.state_dict(model, rank0_only=False), want)


def test_what_does_not_fit_raises_on_all_ranks() -> None:
    run(at_each_stage, 2, _errors, limit_s=120.0)


@in_folder
def _optimizers(rank: int, world: int, stage: int, folder: str) -> None:
    for rule, cls in (("adamw", torch.optim.AdamW), (torch.optim.RMSprop, torch.optim.RMSprop)):
        source = make_gpt(4)
        plain = cls(source.parameters(), lr=3e-3)
        for step in range(2):
            loss_of(source, batch(step, 0)).backward()
            plain.step()
            plain.zero_grad()
        by_name, state = get_state_dict(source, plain)
        name = f"{folder}/{cls.__name__}"
        if rank == 0:
            dcp.save(
                {"model": by_name, "optimizer": state}, checkpoint_id=f"{name}-names", no_dist=True
            )
            both = {"model": source.state_dict(), "optim": plain.state_dict()}
            dcp.save({"app": both}, checkpoint_id=f"{name}-numbers", no_dist=True)
        dist.barrier()
        for kind in ("names", "numbers"):
            model, opt = make(stage, rule)
            train(model, opt, rank, range(1))
            zero.load(f"{name}-{kind}", model, opt)
            assert opt.param_groups[0]["lr"] == 3e-3
            for ours, theirs in zip(model.parameters(), source.parameters(), strict=True):
                assert torch.equal(zero.full_param(ours), theirs)
                assert_equal(zero.full_state(ours), plain.state[theirs])
            train(model, opt, rank, range(1))
        model, opt = make(stage, "sgd", momentum=0.9)
        before = {n: zero.full_param(p) for n, p in model.named_parameters()}
        with pytest.raises(ValueError, match="state of parameter"):
            zero.load(f"{name}-names", model, opt)
        norm = make_gpt().norm
        few = zero.ZeroOptimizer(norm, rule, stage=stage, lr=0.1, timeout=30.0)
        with pytest.raises(ValueError, match="param groups"):
            zero.load(f"{name}-names", norm, few)
        values = {n: zero.full_param(p) for n, p in model.named_parameters()}
        assert_equal(values, before)
    if rank == 0:
        dcp.save({"model": make_gpt().state_dict()}, checkpoint_id=f"{folder}/none", no_dist=True)
    dist.barrier()
    model, opt = make(stage)
    with pytest.raises(ValueError, match="leave opt out"):
        zero.load(f"{folder}/none", model, opt)


def test_optimizers_of_torch() -> None:
    run(at_each_stage, 2, _optimizers, limit_s=120.0)


def _fsdp2(rank: int, world: int, folder: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = make_gpt(4)
    mesh = init_device_mesh("cpu", (world,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    plain.step()
    want = {name: value.full_tensor() for name, value in model.state_dict().items()}
    by_name, state = get_state_dict(model, plain)
    dcp.save({"model": by_name, "optimizer": state, "step": 1}, checkpoint_id=folder)
    for stage in (1, 3):
        ours, opt = make(stage, param_dtype=torch.bfloat16)
        zero.load(folder, ours, opt)
        for name, parameter in ours.named_parameters():
            assert torch.equal(zero.full_param(parameter), want[name]), name
            moments = zero.full_state(parameter)
            assert moments["step"] == 1
            assert torch.equal(moments["exp_avg"], torch.full(parameter.shape, 1.0).mul(0.1)), name


def test_a_checkpoint_of_fsdp2(tmp_path: Path) -> None:
    run(_fsdp2, 2, str(tmp_path / "dcp"))


def test_one_process_and_a_plain_model(tmp_path: Path) -> None:
    source = make_gpt(3)
    for kind, path in _write(str(tmp_path), source).items():
        model = make_gpt()
        zero.load(path, model)
        assert_equal(model.state_dict(), source.state_dict())
        if kind in ("index", "folder"):
            with zero.deferred_init():
                deferred = make_gpt()
            zero.ZeroModule(deferred, stage=3, init_from=path)
            assert_equal(zero.state_dict(deferred), source.state_dict())
