"""Streaming: what is read, when, by whom, and what happens when it can't be."""

from __future__ import annotations

import gc
import threading
from typing import Any

import jax
import numpy as np
import pytest

from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading import window as window_buffer
from pipeline.backends.loading.window import WindowBuffer, read_batch
from pipeline.core.errors import DataError
from pipeline.core.files.npy import ALIGNMENT_BYTES, make_aligned_zeros
from pipeline.data.columns import Split
from tests.backends.loading.small_loader import (
    DEVICE,
    SAMPLES,
    CountedColumn,
    LazyNumbers,
    make,
    make_order,
    wait_until,
)

NUMBERS = np.arange(SAMPLES, dtype=np.int32)


@pytest.fixture(autouse=True)
def short_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 2)


def make_stream(column: Any, **more: Any) -> Any:
    return make("stream", Split({"label": column}), make_order(shuffle=False), **more)


def samples_of(first_step: int, last_step: int) -> list[int]:
    """The samples of steps first .. last - 1, in order."""
    steps = make_order(shuffle=False).batches(first_step, last_step - first_step)
    return steps.indices.ravel().tolist()


def test_samples_are_read_once_and_one_window_ahead() -> None:
    column = CountedColumn(NUMBERS)
    loader = make_stream(column)
    for step in range(5):
        loader.get_window(step)
    wait_until(lambda: loader._source.count_ready_steps(6) == 2)
    assert column.reads == samples_of(0, 8)


def test_read_ahead_is_limited_to_one_window() -> None:
    """S-15: what lies in memory is bounded, however long the device takes."""
    column = CountedColumn(NUMBERS)
    loader = make_stream(column)
    loader.get_window(0)
    wait_until(lambda: loader._source.count_ready_steps(2) == 2)
    # The window is on the device, and its buffer is free.
    wait_until(lambda: not any(isinstance(item, WindowBuffer) for item in gc.get_objects()))
    assert len(column.reads) == len(samples_of(0, 4))


def test_samples_after_the_end_are_not_read() -> None:
    """Three steps of a large dataset cost the samples of three steps."""
    column = LazyNumbers(NUMBERS)
    loader = make_stream(column, stop=3)
    assert [(w.start, w.stop) for w in (loader.get_window(0), loader.get_window(2))] == [
        (0, 2),
        (2, 3),
    ]
    assert sorted(column.reads) == sorted(samples_of(0, 3))
    assert (
        loader.get_window(2).inputs.columns["label"].shape
        == loader.get_window(0).inputs.indices.shape
    )


def test_ready_steps_of_the_last_window_are_counted() -> None:
    loader = make_stream(CountedColumn(NUMBERS), stop=3)
    loader.get_window(0)
    wait_until(lambda: loader._source.count_ready_steps(2) == 1)


def test_jump_skips_samples_in_between() -> None:
    column = CountedColumn(NUMBERS)
    loader = make_stream(column, stop=2)
    loader.get_window(0)
    assert loader.get_window(1_000_001).start == 1_000_001
    assert column.reads[:6] == samples_of(0, 2)
    assert column.reads[6:12] == samples_of(1_000_001, 1_000_003)


def test_threads_share_the_samples_of_a_lazy_column(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads meet in the first window: none of them could pass alone."""
    monkeypatch.setattr(window_buffer, "DECODING_THREADS", 2)
    both = threading.Barrier(2, timeout=30)
    met: set[int] = set()

    def meet(index: int) -> None:
        if threading.get_ident() not in met and len(met) < 2:
            met.add(threading.get_ident())
            both.wait()

    column = LazyNumbers(NUMBERS, meet)
    loader = make_stream(column)
    for step in range(9):
        window = loader.get_window(step)
        batch = read_batch(window.inputs, step - window.start)
        assert batch.columns["label"].tolist() == samples_of(step, step + 1)
    assert len(column.threads) == 2


def test_padding_samples_of_a_short_batch_are_decoded_once() -> None:
    """The last batch of an epoch is samples 9, 10 and, filled up, 9 again; padding repeats it."""
    column = LazyNumbers(NUMBERS)
    order = make_order(shuffle=False, samples=4, batch_size=9)
    loader = make("stream", Split({"label": column}), order, stop=1)
    batch = read_batch(loader.get_window(0).inputs, 0)
    assert batch.columns["label"].tolist() == [0, 1, 2, 3, 0, 0, 0, 0, 0]
    assert sorted(set(column.reads)) == [0, 1, 2, 3]
    assert len(column.reads) <= 4 + window_buffer.PARTS // 2


def test_read_ahead_failure_is_raised_when_the_sample_is_needed() -> None:
    column = CountedColumn(NUMBERS, bad=7)
    loader = make_stream(column)
    loader.get_window(0)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^sample 7 can't be decoded$"):
            loader.get_window(2)
    assert loader.get_window(4).start == 4


def test_column_exception_becomes_a_data_error() -> None:
    def fail(index: int) -> None:
        if index == 4:
            raise KeyError("no such tile")

    loader = make_stream(LazyNumbers(NUMBERS, fail))
    expected = r"^column label, sample 4 \(4\.png\): KeyError: 'no such tile'$"
    with pytest.raises(DataError, match=expected):
        loader.get_window(0)

    class Broken(CountedColumn):
        def __getitem__(self, indices: Any) -> np.ndarray:
            raise OSError("the disk is gone")

    with pytest.raises(DataError, match=r"^column label: OSError: the disk is gone$"):
        make_stream(Broken(NUMBERS)).get_window(0)


@pytest.mark.parametrize(
    ("shape", "dtype"), [((3, 5), np.uint8), ((7,), np.int32), ((2, 3, 5), "f4")]
)
def test_aligned_buffer_is_not_copied_on_cpu(shape: tuple[int, ...], dtype: Any) -> None:
    values = make_aligned_zeros(shape, dtype)
    assert (values.shape, values.dtype, values.any()) == (shape, np.dtype(dtype), False)
    assert values.ctypes.data % ALIGNMENT_BYTES == 0
    shifted = jax.block_until_ready(jax.device_put(values, DEVICE))
    assert shifted.unsafe_buffer_pointer() == values.ctypes.data
