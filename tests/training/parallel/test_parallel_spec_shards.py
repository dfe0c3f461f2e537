"""Shards of a batch: how many, and on which devices."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.training.parallel.parallel_spec import ParallelSpec, count_shards, make_shards


def parallel(**fields: Any) -> ParallelSpec:
    values = {
        "mode": "data",
        "devices": 2,
        "mesh": None,
        "shards": None,
        "reproducible": "exact",
        "sync_batch_norm": False,
        "mirror_mean": True,
        "batch_per_device": None,
        "specs": (),
        "constraints": (),
        "batch_axes": ("data",),
        "memory_gib": None,
        "plan": None,
        **fields,
    }
    return ParallelSpec(**values)


@given(batch=st.integers(1, 1024), power=st.integers(0, 3))
def test_default_shards_divide_the_batch_on_up_to_8_devices(batch: int, power: int) -> None:
    devices = 2**power
    shards = count_shards(parallel(devices=devices), batch)
    assert shards % devices == 0
    assert shards <= 8
    if batch % devices == 0:
        assert batch % shards == 0


def test_exact_shards_are_the_same_on_any_number_of_devices() -> None:
    alone, paired = (make_shards(parallel(devices=2), 64, devices) for devices in (1, 2))
    assert alone is not None
    assert paired is not None
    assert (alone.count, alone.axis, alone.add) == (8, None, "tree")
    assert (paired.count, paired.axis, paired.per_device) == (8, "data", 4)


def test_added_gradients_have_a_factor() -> None:
    shards = make_shards(parallel(devices=4, mirror_mean=False), 64, 4)
    assert shards is not None
    assert shards.factor == 4


def test_reproducible_close_has_one_shard_per_device() -> None:
    shards = make_shards(parallel(reproducible="close", sync_batch_norm=True), 64, 2)
    assert shards is not None
    assert (shards.count, shards.add, shards.sync_batch_norm) == (2, "psum", True)
    assert make_shards(parallel(reproducible="close"), 64, 1) is None


def test_batch_without_parts_is_not_sharded() -> None:
    assert make_shards(parallel(mode="none"), 64, 1) is None
    assert make_shards(parallel(shards=1, devices=1), 64, 1) is None


def test_shards_indivisible_by_devices_are_refused() -> None:
    with pytest.raises(ValueError, match="4 shards can't be divided among 3 devices"):
        make_shards(parallel(shards=4, devices=3), 64, 3)
