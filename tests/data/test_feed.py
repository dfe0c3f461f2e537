from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data import feed as feeds
from pipeline.data.columns import Split
from pipeline.data.feed import Feed, ResidentFeed, StreamedFeed, batch_at, make_feed, split_bytes
from pipeline.data.order import Order
from pipeline.errors import DataError
from pipeline.training.state import Batch

SAMPLES, BATCH = 11, 3
KINDS = ("resident", "stream")
DEVICE = jax.devices("cpu")[0]


def make_order(**changed: Any) -> Order:
    settings = {
        "seed": 2**40 + 5,
        "samples": SAMPLES,
        "batch_size": BATCH,
        "shuffle": True,
        "buffer_size": None,
        "drop_remainder": False,
        "repeat": 1,
    }
    return Order(**{**settings, **changed})


def make_split(samples: int = SAMPLES) -> Split:
    """Images that tell which sample they are: 4 bytes and a 4-byte label each."""
    images = np.arange(4 * samples, dtype=np.uint8).reshape(samples, 2, 2, 1)
    return Split({"image": images, "label": np.arange(samples, dtype=np.int32)})


def make(kind: str, split: Split | None = None, order: Order | None = None) -> Feed:
    return make_feed(split or make_split(), order or make_order(), DEVICE, kind)


def steps_of(feed: Feed, first: int, last: int) -> Iterator[Batch]:
    """The batches of steps first .. last - 1, counted from 0, as a backend takes them."""
    for step in range(first, last):
        window = feed.window(step)
        assert window.start <= step < window.stop
        yield batch_at(window.inputs, step - window.start)


def assert_is_step(batch: Batch, step: int, order: Order, split: Split) -> None:
    """Compare with the order of samples, read one at a time."""
    expected = order.batches(step, 1)
    rows = expected.indices[0]
    assert np.array_equal(batch.sample, rows)
    assert (int(batch.pass_), int(batch.count)) == (expected.passes[0], expected.counts[0])
    assert batch.seed.tolist() == [5, 2**8]
    for name, column in split.columns.items():
        one_by_one = np.stack([column[row] for row in rows])
        assert batch.columns[name].dtype == column.dtype
        assert np.array_equal(batch.columns[name], one_by_one)


@pytest.mark.parametrize("kind", KINDS)
def test_batches_follow_the_order_over_passes_and_windows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 5)
    split, order = make_split(), make_order()
    for step, batch in enumerate(steps_of(make(kind), 0, 13)):
        assert_is_step(batch, step, order, split)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(step=st.integers(0, 100_000))
def test_any_step_can_be_had_at_once(kind: str, step: int) -> None:
    """D-14: seeking walks over nothing, so a resumed run reads on where it stopped."""
    (batch,) = steps_of(make(kind), step, step + 1)
    assert_is_step(batch, step, make_order(), make_split())


@pytest.mark.parametrize("kind", KINDS)
def test_going_back_gives_the_same_batches(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 2)
    feed = make(kind)
    once, again = ([b.sample.tolist() for b in steps_of(feed, 3, 9)] for _ in range(2))
    assert once == again


@pytest.mark.parametrize("kind", KINDS)
def test_a_window_serves_all_its_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 4)
    feed = make(kind)
    first = feed.window(6)
    assert (first.start, first.stop) == (6, 10)
    assert all(feed.window(step) is first for step in (9, 7, 6))
    assert feed.window(10).start == 10
    assert feed.window(5).start == 5


class CountedColumn:
    """A column that is read from something slow, such as image files; keeps what was read."""

    def __init__(self, values: np.ndarray, bad: int | None = None) -> None:
        self._values, self._bad = values, bad
        self.shape, self.dtype = values.shape, values.dtype
        self.reads: list[list[int]] = []

    def __getitem__(self, indices: Any) -> np.ndarray:
        self.reads.append(np.asarray(indices).tolist())
        if self._bad is not None and self._bad in self.reads[-1]:
            raise DataError(f"sample {self._bad} can't be decoded")
        return self._values[indices]


def test_streaming_reads_each_window_once_and_one_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 2)
    column = CountedColumn(np.arange(SAMPLES, dtype=np.int32))
    order = make_order(shuffle=False)
    feed = make("stream", Split({"label": column}), order)
    list(steps_of(feed, 0, 5))
    windows = [order.batches(step, 2).indices.ravel().tolist() for step in (0, 2, 4, 6)]
    assert column.reads in (windows[:3], windows)


def test_a_sample_that_cannot_be_read_ahead_is_reported_when_it_is_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 1)
    column = CountedColumn(np.arange(SAMPLES, dtype=np.int32), bad=4)
    feed = make("stream", Split({"label": column}), make_order(shuffle=False))
    feed.window(0)
    with pytest.raises(DataError, match="sample 4 can't be decoded"):
        feed.window(1)


def test_auto_is_resident_up_to_the_limit_and_streams_beyond(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = split_bytes(make_split())
    assert size == SAMPLES * (4 + 4)
    monkeypatch.setattr(feeds, "RESIDENT_LIMIT_BYTES", size)
    assert isinstance(make("auto"), ResidentFeed)
    monkeypatch.setattr(feeds, "RESIDENT_LIMIT_BYTES", size - 1)
    assert isinstance(make("auto"), StreamedFeed)
    assert isinstance(make("resident"), ResidentFeed)


@pytest.mark.parametrize(("limit_bytes", "steps"), [(1, 1), (24, 1), (71, 2), (72, 3), (2**20, 4)])
def test_a_streamed_window_keeps_its_bounds(
    limit_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-15: so many bytes and steps at once, but never less than a step; a batch is 24 bytes."""
    monkeypatch.setattr(feeds, "WINDOW_LIMIT_BYTES", limit_bytes)
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 4)
    feed = make("stream")
    window = feed.window(0)
    moved = sum(column.nbytes for column in window.inputs.columns.values())
    assert (window.stop - window.start, moved) == (steps, 24 * steps)
    assert moved <= max(limit_bytes, 24)
    assert feed.device_bytes == 2 * moved


def test_all_windows_have_one_shape() -> None:
    """One shape, one program, whatever the step."""
    feed = make("resident")
    shapes = [jax.tree.map(np.shape, feed.window(step).inputs) for step in (0, 5000)]
    assert shapes[0] == shapes[1]


def test_a_resident_split_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feeds, "WINDOW_STEPS", 2)
    column = CountedColumn(np.arange(SAMPLES, dtype=np.int32))
    feed = make("resident", Split({"label": column}))
    list(steps_of(feed, 0, 9))
    assert len(column.reads) == 1
    assert feed.device_bytes == SAMPLES * 4
