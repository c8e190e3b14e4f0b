"""The flat layout's properties, for drawn models, world sizes and bucket sizes."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zero_torch import _C

ITEMSIZES = (4, 2, 8, 1)  # by family
parameters = st.lists(
    st.tuples(st.integers(0, 5000) | st.just(1) | st.just(0), st.integers(0, 3)), min_size=1
).map(lambda drawn: [(numel, ITEMSIZES[family], family) for numel, family in drawn])
sizes = st.sampled_from([1, 64, 1000, 4096, 1 << 20])


@given(parameters, st.integers(1, 9), sizes, sizes)
def test_every_element_has_one_place_and_one_owner(
    specs: list[tuple[int, int, int]], world: int, bucket_bytes: int, first: int
) -> None:
    layout = _C.make_layout(specs, world, bucket_bytes, first)
    placed = Counter(index for bucket in layout.buckets for index in bucket.parameters)
    assert placed == Counter(range(len(specs)))
    for number, bucket in enumerate(layout.buckets):
        block = 64 // bucket.itemsize
        assert bucket.numel == world * bucket.shard_numel
        assert bucket.shard_numel % block == 0
        end = 0
        for index in bucket.parameters:
            slot = layout.slots[index]
            numel, itemsize, family = specs[index]
            assert (slot.bucket, slot.numel) == (number, numel)
            assert (bucket.itemsize, bucket.family) == (itemsize, family)
            assert slot.offset % block == 0
            assert 0 <= slot.offset - end < block
            end = slot.offset + numel
        assert 0 <= bucket.numel - end < (world + 1) * block
        assert bucket.parameters == sorted(bucket.parameters, reverse=True)
        if sum(specs[index][0] > 0 for index in bucket.parameters) > 1:
            assert end * bucket.itemsize <= (first if number == 0 else bucket_bytes)


@given(parameters, st.integers(1, 9), sizes)
def test_owned_parts_follow_each_other_and_cover(
    specs: list[tuple[int, int, int]], world: int, bucket_bytes: int
) -> None:
    layout = _C.make_layout(specs, world, bucket_bytes, bucket_bytes)
    for index, (numel, _, _) in enumerate(specs):
        parts = [layout.owned(index, rank) for rank in range(world)]
        covered = [part for part in parts if part[1] > part[0]]
        assert sum(end - begin for begin, end in covered) == numel
        assert all(a[1] == b[0] for a, b in itertools.pairwise(covered))


@given(parameters, st.integers(1, 9), sizes)
def test_equal_arguments_give_equal_layouts(
    specs: list[tuple[int, int, int]], world: int, bucket_bytes: int
) -> None:
    def shape(layout: _C.FlatLayout) -> list[tuple[int, int, int]]:
        return [(slot.bucket, slot.offset, slot.numel) for slot in layout.slots]

    first = _C.make_layout(specs, world, bucket_bytes, 64)
    assert shape(first) == shape(_C.make_layout(specs, world, bucket_bytes, 64))


@pytest.mark.parametrize(
    ("specs", "world", "bucket_bytes", "first"),
    [
        ([(-1, 4, 0)], 1, 64, 64),
        ([(1, 3, 0)], 1, 64, 64),
        ([(1, 4, 0)], 0, 64, 64),
        ([(1, 4, 0)], 1, 0, 64),
        ([(1, 4, 0)], 1, 64, 0),
        ([(1, 4, 0), (1, 2, 0)], 1, 64, 64),
    ],
)
def test_bad_sizes_are_refused(
    specs: list[tuple[int, int, int]], world: int, bucket_bytes: int, first: int
) -> None:
    with pytest.raises(ValueError, match="expected"):
        _C.make_layout(specs, world, bucket_bytes, first)
