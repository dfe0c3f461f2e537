"""A contestant's process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from benchmarks.contestant import ContestantError, started
from benchmarks.tasks import Task

MODULE = "tests.benchmarks.contestants"


@pytest.mark.slow
def test_rounds_continue_after_the_warm_up(digits: Callable[..., Task]) -> None:
    with started(MODULE, replace(digits(), name="idle"), 0.02) as contestant:
        ready = contestant.warm_up()
        first, second = contestant.run(), contestant.run()
    assert ready.sizes == (2, 3)
    assert ready.proof == (1.0, 2.0, 3.0)
    # About 20 steps of a millisecond, in whole sinks of 4.
    assert ready.steps % 4 == 0
    assert 0 < ready.steps <= 20
    assert first.steps == ready.steps
    # And one that is not counted.
    assert second.result.loss == first.result.loss + 1 + second.steps
    assert second.result.part_s == pytest.approx(1e-4 * second.steps)
    assert second.step_ms >= 1.0


@pytest.mark.slow
def test_failure_message_has_one_line(digits: Callable[..., Task]) -> None:
    with (
        started(MODULE, replace(digits(), name="raising"), 0.02) as contestant,
        pytest.raises(ContestantError, match=r"^ValueError: no room for 1 steps$"),
    ):
        contestant.warm_up()


@pytest.mark.slow
def test_process_that_ends_is_reported(digits: Callable[..., Task]) -> None:
    with (
        started(MODULE, replace(digits(), name="dying"), 0.02) as contestant,
        pytest.raises(ContestantError, match=r"^its process ended with exit code 7$"),
    ):
        contestant.warm_up()
