from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import read_batch
from pipeline.data.batch import Batch
from pipeline.data.columns import Split, count_split_bytes
from pipeline.data.host_ops import HostOp, map_on_host
from pipeline.data.order import SampleOrder
from tests.backends.loading.small_loader import (
    SAMPLES,
    CountedColumn,
    LazyNumbers,
    make,
    make_order,
    make_split,
    wait_until,
)

KINDS = ("resident", "stream")


def steps_of(loader: Loader, first: int, last: int) -> Iterator[Batch]:
    """The batches of steps first .. last - 1, counted from 0, as a backend takes them."""
    for step in range(first, last):
        window = loader.get_window(step)
        assert window.start <= step < window.stop
        yield read_batch(window.inputs, step - window.start)


def assert_is_step(batch: Batch, step: int, order: SampleOrder, split: Split) -> None:
    """Compare with the order of samples, read one at a time."""
    expected = order.batches(step, 1)
    rows = expected.indices[0]
    assert np.array_equal(batch.sample, rows)
    assert (int(batch.epoch), int(batch.count)) == (expected.epochs[0], expected.counts[0])
    assert batch.seed.tolist() == [5, 2**8]
    for name, column in split.columns.items():
        one_by_one = np.stack([column[row] for row in rows])
        assert batch.columns[name].dtype == column.dtype
        assert np.array_equal(batch.columns[name], one_by_one)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batches_follow_the_order_over_epochs_and_windows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 5)
    split, order = make_split(), make_order()
    for step, batch in enumerate(steps_of(make(kind), 0, 13)):
        assert_is_step(batch, step, order, split)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=15, deadline=None)
@given(step=st.integers(0, 100_000))
def test_loader_seeks_to_any_step(kind: str, step: int) -> None:
    """D-14: seeking walks over nothing, so a resumed run reads on where it stopped."""
    (batch,) = steps_of(make(kind), step, step + 1)
    assert_is_step(batch, step, make_order(), make_split())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_batches_are_the_same_after_going_back(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    loader = make(kind)
    once, again = ([b.sample.tolist() for b in steps_of(loader, 3, 9)] for _ in range(2))
    assert once == again


@pytest.mark.parametrize("kind", KINDS)
def test_window_covers_all_its_steps(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    loader = make(kind)
    first = loader.get_window(6)
    assert (first.start, first.stop) == (6, 10)
    assert all(loader.get_window(step) is first for step in (9, 7, 6))
    assert loader.get_window(10).start == 10
    assert loader.get_window(5).start == 5


def test_next_window_is_prepared_in_advance(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    for kind in KINDS:
        loader = make(kind)
        loader.get_window(0)
        assert loader.report().queue_depth is None
        wait_until(lambda loader=loader: loader._source.count_ready_steps(2) == 2)
        assert loader._source.count_ready_steps(4) == 0
        loader.get_window(2)
        assert loader.report().queue_depth == 1


def test_window_that_was_read_in_advance_is_not_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """S-03: samples are read while the device computes, and training doesn't wait for them."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    reads: list[int] = []
    split = Split({"image": LazyNumbers(np.arange(SAMPLES, dtype=np.int32), reads.append)})
    loader = make("stream", split, stop=4)
    loader.get_window(0)
    wait_until(lambda: loader._source.count_ready_steps(2) == 2)
    read_in_advance = sorted(reads)
    loader.get_window(2)
    assert sorted(reads) == read_in_advance
    assert loader.report().queue_depth == 1


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_windows_after_the_end_are_prepared_only_on_request(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial may continue after the end of the run, and gets the window that it requests."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    loader = make(kind, stop=4)
    for step, batch in enumerate(steps_of(loader, 0, 11)):
        assert_is_step(batch, step, make_order(), make_split())
    loader.get_window(2)
    assert loader._source.count_ready_steps(4) == 0


@pytest.mark.medium
@pytest.mark.parametrize("kind", KINDS)
def test_closed_loader_still_loads_on_request(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    loader = make(kind)
    loader.get_window(0)
    loader.close()
    assert loader._source.count_ready_steps(2) == 0
    waited_s = loader.waited_s
    loader.get_window(1)
    assert loader.waited_s > waited_s, "the window in hand was let go"
    for step, batch in zip(range(2, 7), steps_of(loader, 2, 7), strict=True):
        assert_is_step(batch, step, make_order(), make_split())


def test_auto_feed_is_resident_up_to_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    size = count_split_bytes(make_split())
    assert size == SAMPLES * (4 + 4)
    monkeypatch.setattr(loader_module, "RESIDENT_LIMIT_BYTES", size)
    assert make("auto").kind == "resident"
    monkeypatch.setattr(loader_module, "RESIDENT_LIMIT_BYTES", size - 1)
    assert make("auto").kind == "stream"
    assert make("resident").kind == "resident"


class Same(HostOp):
    """Changes nothing."""

    name: str = "same"

    def __call__(self, value: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        return value


def test_advice_about_slow_samples_fits_them(monkeypatch: pytest.MonkeyPatch) -> None:
    numbers = np.arange(SAMPLES, dtype=np.int32)
    files = Split({"image": LazyNumbers(numbers)})
    mapped = map_on_host(
        Split({"image": numbers.reshape(-1, 1, 1, 1)}), (Same(column="image"),), seed=0
    )
    assert make("stream", files)._stats._advice.startswith("train.feed=resident")
    monkeypatch.setattr(loader_module, "RESIDENT_LIMIT_BYTES", 1)
    assert make("stream", files)._stats._advice.endswith("convert records")
    assert "host_ops" in make("stream", mapped)._stats._advice
    assert make("stream")._stats._advice.startswith("python -m pipeline profile")


@pytest.mark.parametrize(("limit_bytes", "steps"), [(1, 1), (24, 1), (71, 2), (72, 3), (2**20, 4)])
def test_streamed_window_is_bounded_in_bytes_and_steps(
    limit_bytes: int, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S-15: bytes and steps at once are limited, to a step at least; a batch is 24 bytes."""
    monkeypatch.setattr(loader_module, "WINDOW_LIMIT_BYTES", limit_bytes)
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    loader = make("stream")
    window = loader.get_window(0)
    shifted = sum(column.nbytes for column in window.inputs.columns.values())
    assert (window.stop - window.start, shifted) == (steps, 24 * steps)
    assert shifted <= max(limit_bytes, 24)
    assert loader.device_bytes == 2 * shifted


def test_resident_windows_have_one_shape() -> None:
    """One shape, one program, whatever the step."""
    loader = make("resident")
    shapes = [jax.tree.map(np.shape, loader.get_window(step).inputs) for step in (0, 5000)]
    assert shapes[0] == shapes[1]


@pytest.mark.medium
def test_padded_split_has_the_shape_of_a_larger_split() -> None:
    padded = replace(make_split(SAMPLES - 2), padding=2)
    order = make_order(samples=SAMPLES - 2)
    loader = make("resident", padded, order)
    for step, batch in enumerate(steps_of(loader, 0, 6)):
        assert_is_step(batch, step, order, padded)
    assert loader.device_bytes == make("resident").device_bytes
    windows = loader.get_window(0), make("resident").get_window(0)
    shapes = [jax.tree.map(np.shape, window.inputs) for window in windows]
    assert shapes[0] == shapes[1]


def test_resident_split_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)
    column = CountedColumn(np.arange(SAMPLES, dtype=np.int32))
    loader = make("resident", Split({"label": column}))
    list(steps_of(loader, 0, 9))
    assert column.reads == list(range(SAMPLES))
    assert loader.device_bytes == SAMPLES * 4
