"""Batches of one bucket each (D-18), classes in balance, and files read in turn (D-20)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.order import compute_order_at
from pipeline.data.order_kinds import (
    BalancedOrder,
    BucketedOrder,
    FileShardedOrder,
    InterleavedOrder,
    interleave,
)
from pipeline.data.padding.buckets import assign_buckets

BUCKETED_GOLDEN = json.loads(
    (Path(__file__).parents[1] / "golden/buckets/mindspore.json").read_text()
)


def make_order(buckets: list[int], **changed: Any) -> BucketedOrder:
    settings: dict[str, Any] = {
        "seed": 11,
        "samples": len(buckets),
        "batch_size": 2,
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": False,
        "repeat": 1,
    }
    return BucketedOrder(buckets=np.array(buckets, np.int32), **{**settings, **changed})


@pytest.mark.parametrize(
    "case", BUCKETED_GOLDEN["cases"], ids=lambda case: f"{len(case['lengths'])}"
)
def test_bucketed_batches_match_mindspore_golden(case: dict[str, Any]) -> None:
    """`bucket_batch_by_length`: full batches as they fill up, then what is left in each bucket."""
    sizes = np.array(case["lengths"])[:, None]
    numbers = assign_buckets(sizes, [(bucket,) for bucket in BUCKETED_GOLDEN["buckets"]])
    order = make_order(
        numbers.tolist(),
        batch_size=case["batch_size"],
        drop_remainder=case["drop_remainder"],
        shuffle=False,
    )
    batches = order.batches(0, order.steps_per_epoch)
    own = []
    for row, count in zip(batches.indices, batches.counts, strict=True):
        bucket = BUCKETED_GOLDEN["buckets"][numbers[row[0]]]
        tokens = np.zeros((count, bucket), int)
        for place, sample in enumerate(row[:count]):
            tokens[place, : case["lengths"][sample]] = sample + 1
        own.append(tokens.tolist())
    assert own == case["batches"]


def list_batches(order: BucketedOrder, epochs: int) -> list[tuple[int, list[int], int]]:
    """The batches of the first epochs as (epoch, samples, count), by plain loops."""
    result = []
    for epoch in range(epochs * order.repeat):
        waiting: dict[int, list[int]] = {}
        walk = compute_order_at(
            np.arange(order.samples),
            order.seed,
            epoch,
            order.samples,
            order.shuffle,
            order.buffer_size,
        )
        for sample in walk.tolist():
            queue = waiting.setdefault(int(order.buckets[sample]), [])
            queue.append(sample)
            if len(queue) == order.batch_size:
                result.append((epoch, queue.copy(), order.batch_size))
                queue.clear()
        for _, queue in sorted(waiting.items()):
            if queue and not order.drop_remainder:
                missing = order.batch_size - len(queue)
                result.append((epoch, queue + queue[:1] * missing, len(queue)))
    return result


ORDERS = st.builds(
    make_order,
    st.lists(st.integers(0, 3), min_size=12, max_size=40).filter(
        lambda buckets: max(map(buckets.count, range(4))) >= 4
    ),
    batch_size=st.integers(1, 4),
    shuffle=st.booleans(),
    buffer_size=st.none() | st.integers(1, 50),
    drop_remainder=st.booleans(),
    repeat=st.integers(1, 2),
    seed=st.integers(0, 2**63 - 1),
)


@pytest.mark.slow
@given(order=ORDERS, data=st.data())
def test_steps_equal_slices_of_the_listed_epochs(order: BucketedOrder, data: st.DataObject) -> None:
    whole = list_batches(order, epochs=3)
    assert len(whole) == 3 * order.steps_per_epoch
    first = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - first))
    batches = order.batches(first, count)
    expected = whole[first : first + count]
    assert batches.epochs.tolist() == [epoch for epoch, _, _ in expected]
    assert batches.indices.tolist() == [samples for _, samples, _ in expected]
    assert batches.counts.tolist() == [valid for _, _, valid in expected]


@pytest.mark.slow
@given(order=ORDERS)
def test_batch_has_samples_of_one_bucket(order: BucketedOrder) -> None:
    batches = order.batches(0, 2 * order.steps_per_epoch)
    of_rows = order.buckets[batches.indices]
    assert (of_rows == of_rows[:, :1]).all()


@pytest.mark.slow
@given(order=ORDERS)
def test_epoch_has_every_sample_once_except_remainders(order: BucketedOrder) -> None:
    batches = order.batches(0, order.batches_per_repetition)
    seen = [
        sample
        for row, count in zip(batches.indices.tolist(), batches.counts, strict=True)
        for sample in row[:count]
    ]
    assert len(seen) == len(set(seen))
    if order.drop_remainder:
        counts = np.bincount(order.buckets)
        assert len(seen) == (counts // order.batch_size * order.batch_size).sum()
    else:
        assert sorted(seen) == list(range(order.samples))


def test_single_bucket_equals_order_without_buckets() -> None:
    from tests.data.test_order import make_order as make_plain

    for drop_remainder in (True, False):
        settings = {"batch_size": 4, "drop_remainder": drop_remainder, "shuffle": True, "seed": 5}
        bucketed = make_order([0] * 30, **settings).batches(3, 40)
        plain = make_plain(samples=30, **settings).batches(3, 40)
        assert np.array_equal(bucketed.indices, plain.indices)
        assert np.array_equal(bucketed.counts, plain.counts)


def test_batch_larger_than_every_bucket_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"a batch of 4 can't be filled from any .* must be at most 2"
    ):
        make_order([0, 0, 1], batch_size=4, drop_remainder=True)


SLOW = settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.too_slow])


def balanced_order(labels: list[int], batch: int = 1, **fields: object) -> BalancedOrder:
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
def test_classes_are_drawn_equally_often(counts: list[int], seed: int, epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)) * 3, counts)
    whole = balanced_order(labels.tolist(), seed=seed)
    batches = whole.batches(epoch * len(labels), len(labels))
    drawn = np.bincount(labels[batches.rows.ravel()], minlength=labels.max() + 1)[::3]
    assert drawn.sum() == len(labels)
    assert drawn.max() - drawn.min() <= 1


def test_ignored_label_is_not_a_class_of_a_balanced_epoch() -> None:
    labels = np.array([0, 1, 1, 1, -100, -100])
    order = balanced_order(labels.tolist(), ignore_index=-100)
    drawn = labels[order.batches(0, len(labels)).rows.ravel()]
    assert sorted(drawn.tolist()) == [0, 0, 0, 1, 1, 1]
    with pytest.raises(ValueError, match="no training sample has a class"):
        balanced_order([7, 7], ignore_index=7)


@pytest.mark.medium
@SLOW
@given(counts=counts, seed=st.integers(0, 2**31 - 1))
def test_class_samples_repeat_only_after_all_are_drawn(counts: list[int], seed: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    rows = (
        balanced_order(labels.tolist(), seed=seed, shuffle=False)
        .batches(0, 4 * len(labels))
        .rows.ravel()
    )
    for kind, count in enumerate(counts):
        own = rows[labels[rows] == kind]
        for first in range(0, len(own) - count + 1, count):
            assert len(set(own[first : first + count].tolist())) == count


@pytest.mark.medium
@SLOW
@given(counts=counts, seed=st.integers(0, 2**31 - 1), epoch=st.integers(0, 9))
def test_repeated_sample_has_a_new_key(counts: list[int], seed: int, epoch: int) -> None:
    labels = np.repeat(np.arange(len(counts)), counts)
    batches = balanced_order(labels.tolist(), seed=seed).batches(epoch * len(labels), len(labels))
    keys = batches.indices.ravel()
    assert len(set(keys.tolist())) == len(keys)
    assert batches.samples == len(labels)
    np.testing.assert_array_equal(batches.rows, batches.indices % len(labels))


def test_any_step_is_computed_directly() -> None:
    labels = [0] * 20 + [1] * 3 + [2] * 8
    one, other = balanced_order(labels, 4), balanced_order(labels, 4)
    whole = one.batches(0, 100)
    for step in (0, 7, 33, 99):
        part = other.batches(step, 1)
        np.testing.assert_array_equal(part.indices[0], whole.indices[step])


def test_shards_partition_a_balanced_epoch() -> None:
    labels = [0] * 12 + [1] * 4
    rows = [
        balanced_order(labels, num_shards=2, shard_id=shard).batches(0, 8).indices.ravel()
        for shard in range(2)
    ]
    whole = balanced_order(labels).batches(0, 16).indices.ravel()
    assert sorted(np.concatenate(rows).tolist()) == sorted(whole.tolist())


@pytest.mark.slow
def test_keys_fit_into_int32() -> None:
    labels = np.ones(60_000, int)
    labels[0] = 0
    keys = balanced_order(labels.tolist(), 100).batches(0, 600).indices
    assert keys.min() >= 0
    assert set((keys.ravel() % 60_000 == 0).nonzero()[0].shape) == {30_000}


@pytest.mark.parametrize("seeds", [(1, 2)])
def test_seed_changes_the_order(seeds: tuple[int, int]) -> None:
    labels = [0] * 30 + [1] * 5
    one, other = (balanced_order(labels, seed=seed).batches(0, 35).indices for seed in seeds)
    assert one.tolist() != other.tolist()


INTERLEAVED_GOLDEN = Path(__file__).parents[1] / "golden" / "tfrecord" / "interleave.json"

sizes = st.lists(st.integers(0, 12), min_size=1, max_size=9).filter(any)


def interleaved_order(
    files: tuple[int, ...], cycle_length: int = 2, **fields: object
) -> InterleavedOrder:
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


def epoch_of(whole: InterleavedOrder, epoch: int) -> np.ndarray:
    return whole.batches(epoch * whole.steps_per_epoch, whole.steps_per_epoch).rows.ravel()


def test_files_are_interleaved() -> None:
    files, samples = interleave([3, 1, 2], 2)
    assert list(zip(files.tolist(), samples.tolist(), strict=True)) == [
        (0, 0),
        (1, 0),
        (0, 1),
        (0, 2),
        (2, 0),
        (2, 1),
    ]


def test_interleaving_matches_tensorflow_golden() -> None:
    """Golden values of tests/golden/make_tfrecord.py."""
    for case in json.loads(INTERLEAVED_GOLDEN.read_text())["orders"]:
        found = interleave(case["files"], case["cycle_length"])
        assert np.stack(found, axis=1).tolist() == case["order"], case
        order = interleaved_order(tuple(case["files"]), case["cycle_length"], shuffle=False)
        starts = np.cumsum(case["files"]) - case["files"]
        assert epoch_of(order, 0).tolist() == [starts[file] + n for file, n in case["order"]], case


@pytest.mark.medium
@given(files=sizes, cycle_length=st.integers(1, 4), buffer=st.integers(1, 40))
def test_epoch_has_every_sample_once(files: list[int], cycle_length: int, buffer: int) -> None:
    whole = interleaved_order(tuple(files), cycle_length, buffer_size=buffer)
    for epoch in range(3):
        assert sorted(epoch_of(whole, epoch).tolist()) == list(range(sum(files)))


@pytest.mark.medium
@given(files=sizes, shards=st.integers(1, 4), shuffle=st.booleans())
def test_shards_read_separate_files(files: list[int], shards: int, shuffle: bool) -> None:
    file_of = np.repeat(np.arange(len(files)), files)
    for shard in range(shards):
        if not any(files[shard::shards]):
            continue
        own = interleaved_order(tuple(files), num_shards=shards, shard_id=shard, shuffle=shuffle)
        rows = epoch_of(own, 1)
        assert sorted(rows.tolist()) == own.list_reachable().tolist()
        assert set(file_of[rows]) == {n for n in range(shard, len(files), shards) if files[n]}


def test_file_order_changes_between_epochs() -> None:
    whole = interleaved_order((4,) * 8, cycle_length=1)
    firsts = {tuple((epoch_of(whole, epoch)[::4] // 4).tolist()) for epoch in range(5)}
    assert len(firsts) == 5


def test_unshuffled_epochs_are_equal() -> None:
    whole = interleaved_order((2, 2, 2), shuffle=False, buffer_size=None)
    assert epoch_of(whole, 0).tolist() == epoch_of(whole, 3).tolist() == [0, 2, 1, 3, 4, 5]


def test_shard_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no samples|can't be filled"):
        interleaved_order((3, 0), num_shards=2, shard_id=1)


@pytest.mark.medium
@given(
    files=st.lists(st.integers(2, 9), min_size=4, max_size=9),
    groups=st.sampled_from([1, 2, 4]),
    shuffle=st.booleans(),
    first=st.integers(0, 9),
)
def test_batch_parts_read_separate_files(
    files: list[int], groups: int, shuffle: bool, first: int
) -> None:
    """D-20: part g of every batch is what a shard g of the files reads (TensorFlow's order)."""
    settings: dict[str, Any] = {
        "seed": 5,
        "samples": sum(files),
        "shuffle": shuffle,
        "buffer_size": 4,
        "drop_remainder": True,
        "repeat": 1,
        "cycle_length": 2,
        "files": tuple(files),
    }
    order = FileShardedOrder(**settings, batch_size=groups, file_shards=groups)
    steps = order.steps_per_epoch
    assert steps == min(sum(files[number::groups]) for number in range(groups))
    batches = order.batches(0, 2 * steps)
    assert (batches.counts == groups).all()
    for number in range(groups):
        shard = InterleavedOrder(**settings, batch_size=1, num_shards=groups, shard_id=number)
        for epoch in (0, 1):
            rows = batches.indices[epoch * steps : (epoch + 1) * steps, number]
            np.testing.assert_array_equal(rows, shard._find_samples(epoch, np.arange(steps)))
    later = order.batches(first, 3)
    np.testing.assert_array_equal(later.indices, order.batches(0, first + 3).indices[first:])
    np.testing.assert_array_equal(later.epochs, np.arange(first, first + 3) // steps)
