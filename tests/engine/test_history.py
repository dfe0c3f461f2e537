"""Times of steps, without the first dispatch, which compiles."""

from __future__ import annotations

import pytest

from pipeline.engine.history import MAX_TIMED_DISPATCHES, History


def test_first_dispatch_is_timed_separately() -> None:
    history = History(step=0)
    assert (history.step_ms, history.median_step_ms) == (None, None)
    history.add_dispatch(10, 5.0, ended_at=105.0)
    assert (history.first_dispatch_s, history.first_step_at) == (5.0, 105.0)
    assert (history.step_ms, history.median_step_ms) == (None, None)
    history.add_dispatch(10, 1.0, ended_at=106.0)
    history.add_dispatch(30, 6.0, ended_at=112.0)
    assert history.first_dispatch_s == 5.0
    assert history.step_ms == pytest.approx(1000 * 7.0 / 40)
    assert history.median_step_ms == pytest.approx(150)


def test_mean_covers_all_dispatches_and_median_the_newest() -> None:
    history = History(step=0)
    for number in range(2 * MAX_TIMED_DISPATCHES + 1):
        history.add_dispatch(1, 1.0 if number <= MAX_TIMED_DISPATCHES else 3.0, ended_at=0.0)
    assert history.step_ms == pytest.approx(2000)
    assert history.median_step_ms == pytest.approx(3000)
