"""The sample order against a loop that lists whole epochs, and the laws of a shuffle."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data import order as orders
from pipeline.data.order import Batching, SampleOrder, compute_order_at, list_shuffled

SEEDS = st.integers(0, 2**63 - 1)
EPOCHS = st.integers(0, 2**31 - 1)


def list_epoch(seed, epoch, samples, shuffle, window):
    return compute_order_at(np.arange(samples), seed, epoch, samples, shuffle, window)


@pytest.mark.medium
@given(seed=SEEDS, epoch=EPOCHS, samples=st.integers(1, 60), window=st.integers(1, 80) | st.none())
def test_shuffled_epoch_is_a_permutation_within_its_window(seed, epoch, samples, window):
    order = list_epoch(seed, epoch, samples, True, window)
    assert order.dtype == np.int32
    assert sorted(order) == list(range(samples))
    latest = np.arange(samples) + (window or samples) - 1  # D-08: what has entered the buffer
    assert (order <= latest).all()


@given(seed=SEEDS, epoch=EPOCHS)
def test_unshuffled_order_is_sequential(seed, epoch):
    np.testing.assert_array_equal(list_epoch(seed, epoch, 9, False, 4), range(9))


def test_window_of_one_does_not_shuffle():
    np.testing.assert_array_equal(list_epoch(3, 0, 20, True, 1), range(20))


@pytest.mark.parametrize("window", [20, 21, 10**6])
def test_window_of_the_whole_dataset_is_a_full_shuffle(window):
    np.testing.assert_array_equal(
        list_epoch(3, 0, 20, True, window), list_epoch(3, 0, 20, True, None)
    )


@pytest.mark.parametrize("window", [None, 10])
def test_epochs_and_seeds_differ_and_repeat_exactly(window):
    drawn = {
        (seed, epoch): list_epoch(seed, epoch, 100, True, window).tobytes()
        for seed in (0, 1, 2**62)
        for epoch in range(4)
    }
    assert len(set(drawn.values())) == 12
    list_shuffled.cache_clear()
    for (seed, epoch), order in drawn.items():
        assert list_epoch(seed, epoch, 100, True, window).tobytes() == order


def test_orders_are_stable_between_versions():
    assert list_epoch(42, 3, 10, True, None).tolist() == [1, 6, 3, 4, 5, 9, 2, 8, 0, 7]
    assert list_epoch(42, 3, 10, True, 4).tolist() == [3, 1, 0, 5, 7, 2, 6, 4, 9, 8]


@pytest.mark.parametrize(
    ("samples", "window", "possible"),
    [
        (3, None, {"012", "021", "102", "120", "201", "210"}),
        (3, 2, {"012", "021", "102", "120"}),
        (4, 2, {"0123", "0132", "0213", "0231", "1023", "1032", "1203", "1230"}),
    ],
)
def test_orders_within_a_window_are_equally_likely(samples, window, possible):
    draws = 400 * len(possible)
    seen = Counter(
        "".join(map(str, list_epoch(1, epoch, samples, True, window))) for epoch in range(draws)
    )
    assert set(seen) == possible
    assert all(abs(count - 400) < 80 for count in seen.values())  # 4 standard deviations


@pytest.mark.medium
@given(seed=SEEDS, epoch=EPOCHS, samples=st.integers(1, 60), window=st.integers(1, 80))
def test_window_shuffle_equals_a_refilled_buffer(seed, epoch, samples, window):
    """The shuffle in vectors against the buffer of D-08, sample by sample."""
    words = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(samples).tolist()
    size = min(window, samples)
    buffer, drawn = list(range(size)), []
    for newcomer in range(size, samples):
        slot = words[newcomer - size] % size
        drawn.append(buffer[slot])
        buffer[slot] = newcomer
    drawn += [buffer[k] for k in sorted(range(size), key=lambda k: words[samples - size + k])]
    assert list_epoch(seed, epoch, samples, True, window).tolist() == drawn
    order = SampleOrder(
        seed=seed,
        samples=samples,
        batch_size=1,
        shuffle=True,
        buffer_size=window,
        drop_remainder=True,
        repeat=1,
    )
    assert order._find_samples(epoch, np.arange(samples)).tolist() == drawn


@pytest.mark.parametrize("shards", [1, 3])
def test_steps_of_large_dataset_match_its_epoch(monkeypatch, shards):
    monkeypatch.setattr(orders, "MAX_LISTED", 50)
    list_shuffled.cache_clear()
    for shuffle, buffer_size in ((True, None), (True, 1000), (True, 7), (False, None)):
        whole = SampleOrder(
            seed=3,
            samples=101,
            batch_size=4,
            shuffle=shuffle,
            buffer_size=buffer_size,
            drop_remainder=True,
            repeat=1,
            num_shards=shards,
            shard_id=shards - 1,
        )
        epoch_samples = whole._find_samples(1, np.arange(whole.shard_samples))
        batches = whole.batches(whole.steps_per_epoch, whole.steps_per_epoch).indices
        assert batches.ravel().tolist() == epoch_samples[: batches.size].tolist()
        if shards == 1:
            assert sorted(epoch_samples.tolist()) == list(range(101))
    list_shuffled.cache_clear()


def test_cached_order_is_read_only():
    with pytest.raises(ValueError, match="read-only"):
        list_shuffled(0, 0, 5, 5)[0] = 1


@pytest.mark.parametrize(
    ("samples", "batch_size", "drop_remainder", "repeat", "steps"),
    [
        (60_000, 32, True, 1, 1875),
        (60_000, 64, False, 1, 938),
        (60_000, 64, True, 1, 937),
        (50_000, 256, True, 1, 195),
        (50_000, 256, True, 3, 585),
        (7, 7, True, 1, 1),
        (7, 100, False, 2, 2),
    ],
)
def test_steps_per_epoch_count_batches_then_repeat_them(
    samples, batch_size, drop_remainder, repeat, steps
):
    """D-09 to D-11."""
    assert Batching(samples, batch_size, drop_remainder, repeat).steps_per_epoch == steps


def test_last_batch_of_60000_by_64_holds_32_samples():
    batches = make_order(samples=60_000, batch_size=64, drop_remainder=False).batches(936, 3)
    assert batches.counts.tolist() == [64, 32, 64]  # D-09


def test_batch_larger_than_the_dataset_is_refused():
    with pytest.raises(ValueError, match=r"batch of 65 .* 64 samples, .* must be at most 64"):
        Batching(64, 65, drop_remainder=True, repeat=1)


@pytest.mark.parametrize("drop_remainder", [True, False])
def test_empty_dataset_is_refused(drop_remainder):
    with pytest.raises(ValueError, match="there are no samples"):
        make_order(samples=0, drop_remainder=drop_remainder)


def make_order(
    samples=10,
    batch_size=4,
    shuffle=False,
    buffer_size=None,
    drop_remainder=True,
    repeat=1,
    seed=0,
):
    return SampleOrder(
        seed=seed,
        samples=samples,
        batch_size=batch_size,
        shuffle=shuffle,
        buffer_size=buffer_size,
        drop_remainder=drop_remainder,
        repeat=repeat,
    )


def list_batches(order, epochs):
    """The batches of the first epochs as (epoch for draws, indices, count), by plain loops."""
    for number in range(epochs * order.repeat):
        left = list_epoch(
            order.seed, number, order.samples, order.shuffle, order.buffer_size
        ).tolist()
        while left:
            batch, left = left[: order.batch_size], left[order.batch_size :]
            missing = order.batch_size - len(batch)
            if missing == 0 or not order.drop_remainder:
                yield number, batch + batch[:1] * missing, len(batch)


@pytest.mark.medium
@given(
    order=st.builds(
        make_order,
        samples=st.integers(6, 30),
        batch_size=st.integers(1, 6),
        shuffle=st.booleans(),
        buffer_size=st.none() | st.integers(1, 40),
        drop_remainder=st.booleans(),
        repeat=st.integers(1, 3),
        seed=SEEDS,
    ),
    data=st.data(),
)
def test_steps_equal_slices_of_the_listed_epochs(order, data):
    whole = list(list_batches(order, epochs=3))
    assert len(whole) == 3 * order.steps_per_epoch
    first = data.draw(st.integers(0, len(whole)))
    count = data.draw(st.integers(0, len(whole) - first))
    batches = order.batches(first, count)
    expected = whole[first : first + count]
    assert batches.epochs.tolist() == [number for number, _, _ in expected]
    assert batches.indices.tolist() == [indices for _, indices, _ in expected]
    assert batches.counts.tolist() == [valid for _, _, valid in expected]
    assert batches.indices.shape == (count, order.batch_size)
    assert {batches.indices.dtype, batches.epochs.dtype, batches.counts.dtype} == {
        np.dtype(np.int32)
    }


def test_oversized_batch_is_padded_with_the_first_sample():
    batches = make_order(samples=3, batch_size=5, drop_remainder=False).batches(0, 2)
    assert batches.indices.tolist() == [[0, 1, 2, 0, 0]] * 2
    assert batches.counts.tolist() == [3, 3]


def test_repetitions_within_an_epoch_are_shuffled_separately():
    order = make_order(samples=40, batch_size=40, shuffle=True, repeat=2)
    batches = order.batches(0, 4)
    assert batches.epochs.tolist() == [0, 1, 2, 3]
    assert len({row.tobytes() for row in batches.indices}) == 4


def test_distant_step_costs_no_more_than_a_near_one():
    order = make_order(samples=60_000, batch_size=32, shuffle=True)
    list_shuffled.cache_clear()
    batches = order.batches(1875 * 1_000_000 + 5, 1)
    assert list_shuffled.cache_info().misses == 1
    assert batches.epochs.tolist() == [1_000_000]
    expected = list_epoch(0, 1_000_000, 60_000, True, None)[5 * 32 : 6 * 32]
    np.testing.assert_array_equal(batches.indices[0], expected)
