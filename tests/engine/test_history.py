"""The likely cause of a non-finite step that ends a run, and the advice instead of a resume.

Times of steps, without the first dispatch, which compiles.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from pipeline.engine.history import MAX_TIMED_DISPATCHES, Examination, History, RecentSteps, advise
from tests.step_rows import telemetry_of

RATE = 0.5


def _recent(losses: list[float], norms: list[float], rate: float = RATE) -> RecentSteps:
    rows = np.array([[a, rate, b, 1.0, 0.0] for a, b in zip(losses, norms, strict=True)])
    recent = RecentSteps()
    for step in range(len(rows)):
        recent.add(telemetry_of(step, rows[step : step + 1]))
    return recent


def test_exploding_loss_names_the_learning_rate() -> None:
    recent = _recent([2.3, 40.0, 1e12, math.nan], [1.0] * 4, rate=1e9)
    assert recent.explain(Examination()) == (
        "the loss rose from 2.3 to 1e+12 within 2 steps; the learning rate of step 3 is 1e+09, "
        "which is the likely cause: try a smaller train.optimizer.lr"
    )


def test_explanation_does_not_depend_on_dispatch_size() -> None:
    losses = [2.3, 40.0, 1e12, math.nan]
    whole = RecentSteps()
    whole.add(telemetry_of(0, np.array([[loss, RATE, 1.0, 1.0, 0.0] for loss in losses])))
    assert whole.explain(Examination()) == _recent(losses, [1.0] * 4).explain(Examination()) != ""


def test_exploding_gradient_norm_is_explained() -> None:
    text = _recent([2.3, 2.2, math.inf], [1.0, 1e8, math.nan]).explain(Examination())
    assert text.startswith("the gradient norm rose from 1 to 1e+08 within 1 step; the learning")


def test_huge_weights_after_the_first_step_are_explained() -> None:
    text = _recent([2.3, math.nan], [1.0, math.nan]).explain(Examination(largest_weight=7e7))
    assert text.startswith("after 1 step a weight has reached 7e+07; the learning rate of step 1")


@pytest.mark.parametrize(
    ("losses", "rate", "examined"),
    [
        ([2.3, 2.2, 2.4, math.nan], RATE, Examination(largest_weight=3.0)),
        ([2.3, 1e12, math.nan], RATE, Examination(is_in_data=True)),
        ([2.3, 1e12, math.nan], 0.0, Examination()),
        ([1e-6, 1e-3, math.nan], RATE, Examination()),
        ([1e12, 2.3, math.nan], RATE, Examination()),
        ([math.nan], RATE, Examination(largest_weight=1e9)),
    ],
    ids=["steady", "in the data", "no rate", "small losses", "a fall", "the first step"],
)
def test_learning_rate_is_not_blamed_without_evidence(
    losses: list[float], rate: float, examined: Examination
) -> None:
    assert _recent(losses, [1.0] * len(losses), rate).explain(examined) == ""


def test_loss_around_zero_has_not_exploded() -> None:
    """As a negative log-likelihood may be."""
    assert _recent([-300.0, 15.0, math.nan], [1.0] * 3).explain(Examination()) == ""


def test_old_rise_is_not_the_cause() -> None:
    losses = [2.3, 1e6, *[1e6] * 40, math.nan]
    assert _recent(losses, [1.0] * len(losses)).explain(Examination()) == ""


@pytest.mark.parametrize(
    ("examined", "cause", "policy", "advice"),
    [
        (Examination(), "it rose", "stop", "a smaller train.optimizer.lr"),
        (Examination(is_in_data=True), "", "stop", "corrected data, or train.on_nan=skip"),
        (Examination(is_in_data=True), "", "skip", "corrected data"),
        (Examination(), "", "rollback", "another train.optimizer.lr or train.precision"),
    ],
)
def test_advice_names_the_setting_to_change(
    examined: Examination, cause: str, policy: str, advice: str
) -> None:
    said = advise(examined, cause, 7, policy)
    assert said == f"would fail at step 7 again; start a new run with {advice}"


def test_advice_is_empty_if_the_step_may_succeed() -> None:
    assert advise(Examination(repeats=False), "", 7, "stop") == ""


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
