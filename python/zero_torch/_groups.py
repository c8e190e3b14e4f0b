"""Which ranks train together: a process group, a device mesh, or the two groups of a grid."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from . import _C
from .init import default_group

if TYPE_CHECKING:
    from .config import ZeroConfig

_NAMES = ("shard_group", "replicate_group")


def group_name(name: str, group: Any) -> str:
    """The name of a setting's group, for errors. Raises TypeError for what is no group."""
    if _is_foreign(group):
        return "not a member"
    group = _of_mesh(name, group)
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"expected {name} to be a torch.distributed.ProcessGroup or a DeviceMesh of one "
            f"dimension, or None; got {group!r}"
        )
    return str(group.group_name)


def ranks_of(process_group: Any, config: ZeroConfig) -> dist.ProcessGroup | _C.Groups | None:
    """What the engine is made over; None for one rank without a launcher.

    Collective where ``shard_group`` and ``replicate_group`` are given: raises ValueError on all
    ranks where they form no grid.
    """
    if config.shard_group is not None or config.replicate_group is not None:
        return _grid(process_group, config)
    if process_group is None:
        return default_group(config.timeout)
    if _is_mesh(process_group):
        _check_member("process_group", process_group)
        if process_group.ndim == 2:  # (replicate, shard), as in FSDP2
            return _C.Groups(shard=process_group.get_group(1), replicate=process_group.get_group(0))
    return _checked("process_group", _of_mesh("process_group", process_group, "one or two"))


def _is_mesh(value: Any) -> bool:
    if not dist.is_available():
        return False
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(value, DeviceMesh)


def _is_foreign(group: Any) -> bool:
    """What ``new_group`` gives to ranks that are not in it."""
    return dist.is_available() and group is dist.GroupMember.NON_GROUP_MEMBER


def _check_member(name: str, mesh: Any) -> None:
    if mesh.get_coordinate() is None:
        raise ValueError(f"expected {name} to be a mesh that this rank is in, got {mesh}")


def _of_mesh(name: str, group: Any, allowed: str = "one") -> Any:
    """The group of a mesh of one dimension; anything else as it is."""
    if not _is_mesh(group):
        return group
    if group.ndim != 1:
        raise ValueError(
            f"expected {name} to be a DeviceMesh of {allowed} dimensions, got {group.ndim}: "
            f"{group}; take those to shard over, as mesh['replicate', 'shard'] or mesh['shard']"
        )
    _check_member(name, group)
    return group.get_group()


def _checked(name: str, group: Any) -> dist.ProcessGroup:
    if not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise TypeError(
            f"expected {name} to be a torch.distributed.ProcessGroup of which this rank is a "
            f"member, a DeviceMesh of one or two dimensions, or None; got {group!r}"
        )
    return group


def _grid(process_group: Any, config: ZeroConfig) -> _C.Groups:
    if _is_mesh(process_group):
        raise ValueError(
            "expected shard_group and replicate_group, or a DeviceMesh as process_group, got both"
        )
    if process_group is None:
        everyone = default_group(config.timeout)
    else:
        everyone = _checked("process_group", process_group)
    given = {name: _of_mesh(name, getattr(config, name)) for name in _NAMES}
    if everyone is None:
        raise ValueError(
            "expected torch.distributed to be initialized with shard_group and replicate_group"
        )
    own = {name: _members(group) for name, group in given.items()}
    texts = _C.exchange_texts(everyone, json.dumps(own), config.timeout)
    ranks = dist.get_process_group_ranks(everyone)
    complaint = _complaint(dict(zip(ranks, map(json.loads, texts), strict=True)))
    if complaint is not None:
        raise ValueError(
            "expected shard_group and replicate_group to be the rows and columns of one grid of "
            f"all {len(ranks)} ranks, the same numbers of ranks in each; {complaint} (this is rank "
            f"{dist.get_rank()}); make them with init_device_mesh(device, (replicas, shards))"
        )
    return _C.Groups(shard=given["shard_group"], replicate=given["replicate_group"])


def _members(group: Any) -> list[int] | str:
    if group is None:
        return "none"
    if _is_foreign(group):
        return "a group that it is not in"
    return dist.get_process_group_ranks(group)


def _complaint(given: dict[int, dict[str, list[int] | str]]) -> str | None:
    """What is wrong with all ranks' groups: the same on every rank; None for a grid."""
    for rank, groups in given.items():
        for name in _NAMES:
            found = _wrong_group(name, rank, groups[name], given)
            if found is not None:
                return found
    first = next(iter(given))
    for rank in given:
        for name in _NAMES:
            ours, theirs = len(given[first][name]), len(given[rank][name])
            if ours != theirs:
                return f"{name} has {ours} ranks on rank {first} and {theirs} on rank {rank}"
    shards, replicas = (len(given[first][name]) for name in _NAMES)
    if shards * replicas != len(given):
        return f"got groups of {shards} and of {replicas} ranks"
    for rank, groups in given.items():
        found = _wrong_place(rank, groups, given)
        if found is not None:
            return found
    return None


def _wrong_group(
    name: str, rank: int, group: list[int] | str, given: dict[int, dict[str, list[int] | str]]
) -> str | None:
    if isinstance(group, str):
        return f"rank {rank} gave {group} as {name}"
    for member in group:
        if member not in given:
            return f"{name} {group} of rank {rank} has rank {member}, which is not in process_group"
        if given[member][name] != group:
            return (
                f"rank {rank} gave {group} as {name}, and rank {member}, which is in it, gave "
                f"{given[member][name]}"
            )
    return None


def _wrong_place(rank: int, groups: dict[str, Any], given: dict[int, dict[str, Any]]) -> str | None:
    """Row and column meet in one rank, which is of the same number in all columns and rows."""
    shard, replicate = (groups[name] for name in _NAMES)
    common = sorted(set(shard) & set(replicate))
    if common != [rank]:
        return f"shard_group {shard} and replicate_group {replicate} of rank {rank} share {common}"
    for name, across, group in (
        ("shard_group", "replicate_group", replicate),
        ("replicate_group", "shard_group", shard),
    ):
        for other in group:
            own, theirs = given[rank][name].index(rank), given[other][name].index(other)
            if own != theirs:
                return (
                    f"ranks {rank} and {other}, of one {across}, are number {own} and {theirs} of "
                    f"their {name}"
                )
    return None
