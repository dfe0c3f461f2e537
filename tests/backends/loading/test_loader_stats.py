"""Starvation is reported when it begins and ends, with its cause; a clock set by hand (S-12)."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.loading import loader as loader_module
from pipeline.backends.loading import window
from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.loader_stats import (
    LoaderStats,
    PrepareTime,
    SlowSample,
    WindowHandoff,
    format_starvation,
)
from pipeline.backends.loading.window import Window
from pipeline.data.columns import Split
from tests.backends.loading.small_loader import (
    SAMPLES,
    HandClock,
    LazyNumbers,
    make,
    make_order,
    set_clock,
    wait_until,
)

Reports = list[tuple[bool, str]]


def hand_over(start: int, wait_s: float, busy_s: float = 1.0) -> WindowHandoff:
    return WindowHandoff(start, 10, busy_s, wait_s, 0 if wait_s else 10, 10, PrepareTime())


def reports_of(waits_s: list[float]) -> tuple[LoaderStats, Reports]:
    reported: Reports = []
    stats = LoaderStats(lambda *what: reported.append(what))
    for number, wait_s in enumerate(waits_s):
        stats.add(hand_over(10 * number, wait_s))
    return stats, reported


def test_starvation_is_reported_once_per_episode() -> None:
    _, reported = reports_of([0, 0.04, 0.5, 0.5, 0.02, 0.06, 0.001, 0, 0.5])
    assert [starves for starves, _ in reported] == [True, False, True]
    assert reported[0][1].startswith(
        "training waits for data from step 21: 50.00 of 150.00 ms a step"
    )
    assert reported[1][1] == "data is fast enough again from step 61"


def test_wait_below_a_millisecond_is_not_starvation() -> None:
    """A millisecond is a large share of a millisecond, and still noise."""
    reported: Reports = []
    stats = LoaderStats(lambda *what: reported.append(what))
    stats.add(hand_over(0, 0.0009, busy_s=0.0001))
    assert not reported
    assert not stats.report("stream").starved


@pytest.mark.medium
@given(st.lists(st.tuples(st.floats(0, 10), st.floats(0.01, 10)), min_size=1))
def test_report_totals_add_up(times: list[tuple[float, float]]) -> None:
    stats = LoaderStats(None)
    stats.add_unprepared(0.25, 10, PrepareTime({"image": 1.0}))
    for wait_s, busy_s in times:
        stats.add(
            WindowHandoff(0, 20, busy_s, wait_s, 5, 10, PrepareTime({"image": 3.0, "label": 1.0}))
        )
    waits, busy = map(sum, zip(*times, strict=True))
    report, windows = stats.report("stream"), len(times)
    assert report.first_wait_ms == report.first_window_ms == 250
    assert report.wait_ms_per_step == pytest.approx(1000 * waits / (20 * windows))
    assert report.wait_share == pytest.approx(waits / (waits + busy))
    assert report.queue_depth == pytest.approx(0.5)
    prepared = 10 * (windows + 1)
    assert report.prepare_ms_per_step["image"] == pytest.approx(1000 * (1 + 3 * windows) / prepared)
    assert report.starved == any(w > 1e-3 and w / (w + b) > 0.05 for w, b in times)


def test_single_window_reports_nothing() -> None:
    report = LoaderStats(None).report("resident")
    assert (report.wait_share, report.wait_ms_per_step, report.queue_depth) == (None, None, None)
    assert (report.kind, report.starved, report.slowest_sample) == ("resident", False, None)


def test_slowest_sample_of_all_readers_is_reported() -> None:
    slow, slower = SlowSample("image", 3, "c.png", 0.5), SlowSample("image", 8, "h.png", 0.75)
    total = PrepareTime.sum_times(
        [PrepareTime({"image": 1.0}, slow), PrepareTime(), PrepareTime({"image": 2.0}, slower)]
    )
    assert total == PrepareTime({"image": 3.0}, slower)


def test_line_names_the_slow_column_and_sample() -> None:
    slowest = SlowSample("image", 412, "cat/x.png", 0.3)
    prepare_time = PrepareTime({"label": 0.1, "image": 0.4}, slowest)
    given = WindowHandoff(20, 20, 0.6, 0.2, 4, 20, prepare_time)
    assert format_starvation(given, "convert the data") == (
        "training waits for data from step 21: 10.00 of 40.00 ms a step (25%); 4 of 20 steps were "
        "ready; preparing one takes, in ms: image 20.00, label 5.00; slowest sample: image of "
        "sample 412 (cat/x.png), 300.0 ms; convert the data"
    )


class TimedWindows:
    """Windows of 1, 2, 4 and then 8 steps. Each is read while the one before it is used."""

    kind = "stream"
    device_bytes = 0

    def __init__(self, clock: HandClock, read_s: float) -> None:
        self._clock = clock
        self._read_s = read_s
        self._begun_at = clock()

    def count_ready_steps(self, step: int) -> int:
        return 0

    def take(self, step: int) -> tuple[Window, PrepareTime]:
        size = min(8, step + 1)
        ready_at = self._begun_at + self._read_s * size
        self._clock.advance(max(0.0, ready_at - self._clock()))
        self._begun_at = self._clock()
        return Window(step, step + size, None, is_early=step < 15), PrepareTime()  # type: ignore[arg-type]

    def close(self) -> None:
        pass


@pytest.mark.parametrize(("read_s", "noticed"), [(1.25, [2]), (3.0, [2]), (0.9, []), (0.45, [])])
def test_growing_windows_show_starvation_only_of_slower_readers(
    clock: HandClock, read_s: float, noticed: list[int]
) -> None:
    """A step takes 1 s. A reader that isn't twice as fast is late for a window twice as long."""
    lines: list[str] = []
    source = TimedWindows(clock, read_s)
    loader = Loader(source, lambda _, text: lines.append(text), "convert the data")
    for step in range(40):
        loader.get_window(step)
        clock.advance(1.0)
    shares = {1.25: "250.00 of 1250.00 ms a step (20%)", 3.0: "2000.00 of 3000.00 ms a step (67%)"}
    assert [line.split("; ")[0] for line in lines] == [
        f"training waits for data from step {step}: {shares[read_s]}" for step in noticed
    ]
    assert all(line.endswith("; convert the data") for line in lines)
    report = loader.report()
    assert report.starved == bool(noticed)
    assert report.wait_share == pytest.approx(max(0, 1 - 1 / read_s))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> HandClock:
    clock = HandClock()
    set_clock(monkeypatch, clock)
    return clock


@pytest.fixture
def reported() -> Reports:
    return []


def make_watched(column: LazyNumbers, reported: Reports) -> Loader:
    """Windows of two steps of three samples, read by one thread."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader_module, "WINDOW_STEPS", 2)
        patch.setattr(window, "DECODING_THREADS", 1)
        order, split = make_order(shuffle=False), Split({"image": column})
        loader = make("stream", split, order, notify=lambda *what: reported.append(what), stop=8)
        loader.get_window(0)
        return loader


def test_slow_sample_that_starves_training_is_reported(clock: HandClock, reported: Reports) -> None:
    """Sample 7 takes 1 s, of which training works for a half and waits for the other."""

    started, armed = threading.Event(), threading.Event()

    def read(index: int) -> None:
        if index == 7:
            started.set()
            assert armed.wait(30)
            assert clock.requested.wait(30)
            clock.advance(0.5)

    loader = make_watched(LazyNumbers(np.arange(SAMPLES, dtype=np.int32), read), reported)
    assert started.wait(30)
    clock.advance(0.5)
    clock.requested.clear()
    armed.set()
    loader.get_window(2)
    ((starves, text),) = reported
    assert starves
    assert "training waits for data from step 3: 250.00 of 500.00 ms a step (50%)" in text
    assert "0 of 2 steps were ready; preparing one takes, in ms: image 500.00" in text
    assert text.endswith(
        "slowest sample: image of sample 7 (7.png), 1000.0 ms; train.feed=resident would read each "
        "sample once"
    )
    report = loader.report()
    assert report.starved
    assert report.slowest_sample == SlowSample("image", 7, "7.png", 1.0)

    wait_until(lambda: loader._source.count_ready_steps(4) == 2)
    loader.get_window(4)
    assert [starves for starves, _ in reported] == [True, False]
    assert reported[1][1] == "data is fast enough again from step 5"
    assert loader.report().starved, "it was"


def test_ready_data_never_starves_training(clock: HandClock, reported: Reports) -> None:
    loader = make_watched(LazyNumbers(np.arange(SAMPLES, dtype=np.int32)), reported)
    for step in (2, 4, 6):
        wait_until(lambda step=step: loader._source.count_ready_steps(step) == 2)
        clock.advance(0.1)
        loader.get_window(step)
    report = loader.report()
    assert (reported, report.starved, report.wait_share) == ([], False, 0)
    assert (report.queue_depth, report.wait_ms_per_step) == (1, 0)


def test_first_window_after_a_jump_is_not_starvation(clock: HandClock, reported: Reports) -> None:
    slow = LazyNumbers(np.arange(SAMPLES, dtype=np.int32), lambda _: clock.advance(1.0))
    loader = make_watched(slow, reported)
    loader.get_window(7)
    report = loader.report()
    assert (reported, report.starved, report.wait_share) == ([], False, None)
    assert report.first_wait_ms >= 6000


def test_loader_reads_in_separate_threads() -> None:
    column = LazyNumbers(np.arange(SAMPLES, dtype=np.int32))
    make("stream", Split({"image": column}), make_order()).get_window(0)
    assert threading.get_ident() not in column.threads
