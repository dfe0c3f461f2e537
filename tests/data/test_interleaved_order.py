"""Samples of several files, read in turn (D-20)."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.group_orders import InterleavedOrder, interleave

GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord" / "interleave.json"

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any)


def order(files: tuple[int, ...], cycle_length: int = 2, **fields: object) -> InterleavedOrder:
    wanted = {
        "seed": 5,
        "samples": sum(files),
        "batch_size": 1,
        "shuffle": True,
        "buffer_size": 1,
        "drop_remainder": True,
        "repeat": 1,
        "cycle_length": cycle_length,
        "files": files,
        **fields,
    }
    return InterleavedOrder(**wanted)  # type: ignore[arg-type]


def epoch_rows(whole: InterleavedOrder, epoch: int) -> np.ndarray:
    return whole.batches(epoch * whole.steps_per_epoch, whole.steps_per_epoch).rows.ravel()


def test_files_are_read_in_turn() -> None:
    files, samples = interleave([3, 1, 2], 2)
    assert list(zip(files.tolist(), samples.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 2),
        (2, 0),
        (2, 1),
    ]


def test_turns_are_tensorflows() -> None:
    """Golden values of tests/golden/make_tfrecord.py."""
    for case in json.loads(GOLDEN.read_text())["orders"]:
        found = interleave(case["files"], case["cycle_length"])
        assert np.stack(found, axis=1).tolist() == case["order"], case


@given(files=sizes, cycle_length=st.integers(1, 4), buffer=st.integers(1, 40))
def test_an_epoch_has_every_sample_once(files: list[int], cycle_length: int, buffer: int) -> None:
    whole = order(tuple(files), cycle_length, buffer_size=buffer)
    for epoch in range(3):
        assert sorted(epoch_rows(whole, epoch).tolist()) == list(range(sum(files)))


@given(files=sizes, shards=st.integers(1, 4), shuffle=st.booleans())
def test_shards_read_files_of_their_own(files: list[int], shards: int, shuffle: bool) -> None:
    file_of = np.repeat(np.arange(len(files)), files)
    for shard in range(shards):
        if not any(files[shard::shards]):
            continue
        own = order(tuple(files), num_shards=shards, shard_id=shard, shuffle=shuffle)
        rows = epoch_rows(own, 1)
        assert sorted(rows.tolist()) == own.list_reachable().tolist()
        assert set(file_of[rows]) == {n for n in range(shard, len(files), shards) if files[n]}


def test_epochs_open_files_in_another_order() -> None:
    whole = order((4,) * 8, cycle_length=1)
    firsts = {tuple((epoch_rows(whole, epoch)[::4] // 4).tolist()) for epoch in range(5)}
    assert len(firsts) == 5


def test_without_a_shuffle_every_epoch_is_the_same() -> None:
    whole = order((2, 2, 2), shuffle=False, buffer_size=None)
    assert epoch_rows(whole, 0).tolist() == epoch_rows(whole, 3).tolist() == [0, 2, 1, 3, 4, 5]


def test_a_shard_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no samples|can't be filled"):
        order((3, 0), num_shards=2, shard_id=1)
