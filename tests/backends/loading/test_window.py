"""The short windows after a jump: training begins when a little has been read."""

from __future__ import annotations

from itertools import count, pairwise, takewhile

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading import window as window_buffer
from pipeline.backends.loading.window import LoaderSource, ReadPlan
from pipeline.data.columns import Split
from pipeline.training.parallel.state_sharing import DevicePlacement
from tests.backends.loading.small_loader import (
    DEVICE,
    CountedColumn,
    make,
    make_order,
    make_split,
    set_clock,
    wait_until,
)


@pytest.fixture(autouse=True)
def short_windows_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_buffer, "FIRST_WINDOW_DIVISOR", 4)
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 8)


def plan(window_steps: int, stop: int | None = None) -> ReadPlan:
    placement = DevicePlacement((DEVICE,))
    source = LoaderSource(make_split(), make_order(), placement, stop, short_first=True)
    return ReadPlan(source, window_steps)


def test_window_size_doubles_up_to_the_limit() -> None:
    spans = [plan(8).list_steps(3, number) for number in range(5)]
    assert [(span.start, len(span)) for span in spans] == [(3, 2), (5, 4), (9, 8), (17, 8), (25, 8)]
    assert [plan(8).is_early(number) for number in range(4)] == [True, True, True, False]


@pytest.mark.medium
@given(
    window_steps=st.integers(1, 2000), jump=st.integers(0, 10**6), stop=st.integers(1, 2 * 10**6)
)
def test_windows_are_contiguous_up_to_the_end(window_steps: int, jump: int, stop: int) -> None:
    spans = [plan(window_steps, stop).list_steps(jump, number) for number in range(12)]
    for one, next_one in pairwise(spans):
        if one.stop != stop:
            assert next_one.start == one.stop
    read = list(takewhile(lambda span: span.start < stop, spans))
    assert all(span.stop <= stop for span in read)
    assert all(0 < len(span) <= window_steps for span in spans)


def test_first_window_reads_few_samples() -> None:
    column = CountedColumn(np.arange(11, dtype=np.int32))
    order = make_order(shuffle=False)
    loader = make("stream", Split({"label": column}), order, stop=40, short_first=True)
    first = loader.get_window(0)
    assert (first.start, first.stop, first.is_early) == (0, 2, True)
    for step in count(1):
        window = loader.get_window(step)
        assert window.start <= step < window.stop
        if window.stop == 40:
            break
    loader.close()
    assert column.reads == order.batches(0, 40).rows.ravel().tolist()


def test_wait_for_short_windows_is_in_no_average(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter(np.arange(0.0, 1e6, 50.0))
    set_clock(monkeypatch, lambda: float(next(times)))
    column = CountedColumn(np.arange(11, dtype=np.int32))
    loader = make("stream", Split({"label": column}), short_first=True)
    for step in (0, 2, 6):
        loader.get_window(step)
    assert loader.report().wait_share is None
    assert loader.report().first_wait_ms > 0
    wait_until(lambda: loader._source.count_ready_steps(14) > 0)
    loader.get_window(14)
    assert loader.report().wait_share is not None
    loader.close()
