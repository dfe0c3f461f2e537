"""Batches of one bucket each: MindSpore's, and the laws of any (D-18)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.group_orders import BucketedOrder
from pipeline.data.order import compute_epoch_order
from pipeline.data.padding.buckets import assign_buckets

GOLDEN = json.loads((Path(__file__).parents[2] / "golden/buckets/mindspore.json").read_text())


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


@pytest.mark.parametrize("case", GOLDEN["cases"], ids=lambda case: f"{len(case['lengths'])}")
def test_batches_are_those_of_mindspore_golden(case: dict[str, Any]) -> None:
    """`bucket_batch_by_length`: full batches as they fill up, then what is left in each bucket."""
    sizes = np.array(case["lengths"])[:, None]
    numbers = assign_buckets(sizes, [(bucket,) for bucket in GOLDEN["buckets"]])
    order = make_order(
        numbers.tolist(),
        batch_size=case["batch_size"],
        drop_remainder=case["drop_remainder"],
        shuffle=False,
    )
    batches = order.batches(0, order.steps_per_epoch)
    own = []
    for row, count in zip(batches.indices, batches.counts, strict=True):
        bucket = GOLDEN["buckets"][numbers[row[0]]]
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
        walk = compute_epoch_order(
            order.seed, epoch, order.samples, order.shuffle, order.buffer_size
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
def test_any_run_of_steps_equals_that_slice_of_the_listed_epochs(
    order: BucketedOrder, data: st.DataObject
) -> None:
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
def test_no_batch_mixes_buckets(order: BucketedOrder) -> None:
    batches = order.batches(0, 2 * order.steps_per_epoch)
    of_rows = order.buckets[batches.indices]
    assert (of_rows == of_rows[:, :1]).all()


@pytest.mark.slow
@given(order=ORDERS)
def test_an_epoch_has_every_sample_once_but_for_the_remainders(order: BucketedOrder) -> None:
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


def test_one_bucket_is_the_order_without_buckets() -> None:
    from tests.data.test_order import make_order as make_plain

    for drop_remainder in (True, False):
        settings = {"batch_size": 4, "drop_remainder": drop_remainder, "shuffle": True, "seed": 5}
        bucketed = make_order([0] * 30, **settings).batches(3, 40)
        plain = make_plain(samples=30, **settings).batches(3, 40)
        assert np.array_equal(bucketed.indices, plain.indices)
        assert np.array_equal(bucketed.counts, plain.counts)


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="3 buckets for 4 samples"):
        make_order([0, 0, 0], samples=4)
    with pytest.raises(ValueError, match="differ in their number of batches"):
        make_order([0, 0, 0], num_shards=2)
    with pytest.raises(
        ValueError, match=r"a batch of 4 can't be filled from any .* must be at most 2"
    ):
        make_order([0, 0, 1], batch_size=4, drop_remainder=True)
