"""Epochs in which every class comes as often as any other."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.group_orders import BalancedOrder

SLOW = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def order(labels: list[int], batch: int = 1, **fields: object) -> BalancedOrder:
    wanted = {
        "seed": 5,
        "samples": len(labels),
        "batch_size": batch,
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": True,
        "repeat": 1,
        "labels": np.array(labels),
        **fields,
    }
    return BalancedOrder(**wanted)  # type: ignore[arg-type]


counts = st.lists(st.integers(1, 30), min_size=1, max_size=4)


@SLOW
@given(counts=counts, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 50))
def test_every_class_is_drawn_as_often(counts: list[int], seed: int, epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)) * 3, counts)
    whole = order(labels.tolist(), seed=seed)
    batches = whole.batches(epoch * len(labels), len(labels))
    drawn = np.bincount(labels[batches.rows.ravel()], minlength=labels.max() + 1)[::3]
    assert drawn.sum() == len(labels)
    assert drawn.max() - drawn.min() <= 1


@SLOW
@given(counts=counts, seed=st.integers(0, 2**31 - 1))
def test_none_is_drawn_again_before_all_of_its_class_were(counts: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = order(labels.tolist(), seed=seed, shuffle=False).batches(0, 4 * len(labels)).rows.ravel()
    for kind, count in enumerate(counts):
        own = rows[labels[rows] == kind]
        for first in range(0, len(own) - count + 1, count):
            assert len(set(own[first : first + count].tolist())) == count


@SLOW
@given(counts=counts, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 9))
def test_a_sample_has_another_key_each_time(counts: list[int], seed: int, epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    batches = order(labels.tolist(), seed=seed).batches(epoch * len(labels), len(labels))
    keys = batches.indices.ravel()
    assert len(set(keys.tolist())) == len(keys)
    assert batches.samples == len(labels)
    np.testing.assert_array_equal(batches.rows, batches.indices % len(labels))


def test_any_step_is_reached_without_those_before_it() -> None:
    labels = [0] * 20 + [1] * 3 + [2] * 8
    one, other = order(labels, 4), order(labels, 4)
    whole = one.batches(0, 100)
    for step in (0, 7, 33, 99):
        part = other.batches(step, 1)
        np.testing.assert_array_equal(part.indices[0], whole.indices[step])


def test_shards_share_a_balanced_epoch() -> None:
    labels = [0] * 12 + [1] * 4
    rows = [
        order(labels, num_shards=2, shard_id=shard).batches(0, 8).indices.ravel()
        for shard in range(2)
    ]
    whole = order(labels).batches(0, 16).indices.ravel()
    assert sorted(np.concatenate(rows).tolist()) == sorted(whole.tolist())


def test_keys_stay_below_what_int32_holds() -> None:
    labels = np.ones(60_000, int)
    labels[0] = 0
    keys = order(labels.tolist(), 100).batches(0, 600).indices
    assert keys.min() >= 0
    assert set((keys.ravel() % 60_000 == 0).nonzero()[0].shape) == {30_000}


@pytest.mark.parametrize("seeds", [(1, 2)])
def test_another_seed_is_another_order(seeds: tuple[int, int]) -> None:
    labels = [0] * 30 + [1] * 5
    one, other = (order(labels, seed=seed).batches(0, 35).indices for seed in seeds)
    assert one.tolist() != other.tolist()
