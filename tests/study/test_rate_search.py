"""The suggestion against curves of known shape, and a search against a sweep of real runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, RunError
from pipeline.core.reporter import Reporter
from pipeline.study.rate_search import (
    HIGH,
    LOW,
    RateCurve,
    cut_curve,
    measure_rate_curve,
    suggest_rate,
)
from pipeline.training.privacy.privacy_spec import PrivacySpec
from tests import outcome
from tests.conftest import MLP
from tests.whole_run import run

Compose = Callable[..., Recipe]


def make_curve(centre: float, noise: float = 0.0, blows_up_at: float | None = None) -> RateCurve:
    """Losses that fall from 2 to 1 along a logistic function of the rate's logarithm, and grow from
    `blows_up_at` on until they aren't finite."""
    rates = np.geomspace(LOW, HIGH, 200)
    losses = 2 - 1 / (1 + np.exp(-4 * np.log10(rates / centre)))
    losses += noise * np.random.default_rng(0).normal(size=200)
    if blows_up_at is not None:
        losses *= np.maximum(rates / blows_up_at, 1) ** 20
    length = int((losses < 1e30).cumprod().sum())
    return RateCurve(rates[:length], losses[:length], 200)


@pytest.mark.medium
@given(st.floats(1e-4, 1e-2), st.floats(0, 0.1))
def test_suggested_rate_is_at_the_steepest_fall(centre: float, noise: float) -> None:
    suggestion = suggest_rate(make_curve(centre, noise))
    assert centre / 3 < suggestion.rate < centre * 3
    assert suggestion.rate < suggestion.lowest_at


@pytest.mark.medium
@given(st.floats(1e-4, 1e-2))
def test_divergence_does_not_hide_the_fall(centre: float) -> None:
    suggestion = suggest_rate(make_curve(centre, 0.02, blows_up_at=30 * centre))
    assert centre / 2 < suggestion.rate < centre * 2
    assert suggestion.diverges_at is not None
    assert 10 * centre < suggestion.diverges_at < 100 * centre
    assert f"diverges at {suggestion.diverges_at:.2g}" in str(suggestion)


def test_loss_that_never_falls_is_an_error() -> None:
    curve = make_curve(1e6, noise=0.1)
    with pytest.raises(
        RunError, match=r"doesn't fall at any rate .* try more steps, as in --steps"
    ):
        suggest_rate(curve)


@pytest.mark.parametrize(
    ("losses", "place"),
    [([1.0, np.nan], "step 2, after a rate of 0.1$"), ([np.inf, 1.0], "step 1, before any update")],
)
def test_message_names_the_rate_whose_update_made_a_loss_infinite(
    losses: list[float], place: str
) -> None:
    with pytest.raises(RunError, match=f"the loss isn't finite at {place}"):
        cut_curve(np.array([0.1, 0.7]), np.array(losses))


def test_losses_below_0_are_not_raised_by_the_cap() -> None:
    """As of a likelihood: 5 less, the curve has the same suggestion."""
    curve = make_curve(1e-3, 0.02, blows_up_at=0.1)
    lower = replace(curve, losses=curve.losses - 5)
    assert suggest_rate(lower).rate == pytest.approx(suggest_rate(curve).rate, rel=0.3)


def test_average_is_that_of_a_matrix_of_weights() -> None:
    curve = make_curve(1e-3, 0.1, blows_up_at=0.1)
    places = np.arange(len(curve.losses)) / 10
    weights = np.exp(-0.5 * (places[:, None] - places) ** 2)
    expected = weights @ curve.capped / weights.sum(axis=1)
    np.testing.assert_allclose(curve.smoothed, expected, rtol=1e-12)


def test_average_of_the_longest_search_fits_into_memory() -> None:
    losses = np.linspace(2, 1, 100_000)
    smoothed = RateCurve(np.geomspace(LOW, HIGH, 100_000), losses, 100_000).smoothed
    assert smoothed[50_000] == pytest.approx(1.5, abs=1e-4)


def test_resumed_run_is_refused(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=r"train\.resume = old: must be null; checkpoint\.rest"):
        measure_rate_curve(tiny(*MLP, "train.resume=old"), 50, Reporter())


def test_private_recipe_is_refused(tiny: Compose) -> None:
    """A search would train with the key 0, which anyone knows."""
    recipe = tiny(*MLP).model_copy(update={"privacy": PrivacySpec(noise=1.0, delta=1e-5)})
    with pytest.raises(RecipeError, match="privacy: must be null; a search has no secret"):
        measure_rate_curve(recipe, 50, Reporter())


@pytest.mark.medium
def test_rates_from_a_file_are_refused(tiny: Compose, tmp_path: Path) -> None:
    (tmp_path / "rates.txt").write_text("0.1\n" * 45)
    recipe = tiny(*MLP, "schedule=table", f"train.schedule.file={tmp_path / 'rates.txt'}")
    with pytest.raises(RecipeError, match=r"train\.schedule = table: its rates come from a file"):
        measure_rate_curve(recipe, 50, Reporter())


@pytest.mark.slow
def test_losses_equal_a_run_at_the_same_rates(tiny: Compose, tmp_path: Path) -> None:
    rates = np.geomspace(LOW, HIGH, 45)
    (tmp_path / "rates.txt").write_text("\n".join(map(repr, rates.tolist())))
    curve = measure_rate_curve(tiny(*MLP), 45, Reporter())
    table = ["schedule=table", f"train.schedule.file={tmp_path / 'rates.txt'}"]
    run(tiny(*MLP, *table, "train.on_nan.name=skip"), tmp_path / "run")
    losses = [line["loss"] for line in outcome.metrics(tmp_path / "run")]
    assert curve.losses.tolist() == np.float32(losses[: len(curve.losses)]).tolist()
