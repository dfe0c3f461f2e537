from __future__ import annotations

import numpy as np
import pytest

from pipeline.study.final_value.learning_curves import (
    CONFIRMATIONS,
    MIN_POINTS,
    FinalError,
    LearningCurve,
    extrapolate,
    find_highest_chance,
)

SHARES = np.arange(1, 41) / 40


def make_curves(seed: int, groups: int, each: int) -> list[LearningCurve]:
    """Power laws with noise; curves of a group have similar exponents, levels and noise."""
    rng = np.random.default_rng(seed)
    curves = []
    for group in range(groups):
        slope, level, noise = rng.uniform(-1, -0.1), rng.normal(), rng.uniform(0.01, 0.1)
        for _ in range(each):
            line = level + slope * rng.uniform(0.8, 1.2) * np.log(SHARES)
            errors = line + noise * rng.standard_normal(len(SHARES))
            curves.append(LearningCurve(f"group {group}", SHARES, errors))
    return curves


@pytest.mark.parametrize("count", [4, 10, 20])
def test_interval_holds_for_groups_that_are_not_known(count: int) -> None:
    """80 % of 300 curves of 50 new groups end inside, give or take what the groups differ in."""
    curves = make_curves(1, 12, 6)
    inside = []
    for curve in make_curves(2, 50, 6):
        final = extrapolate(curve.shares[:count], curve.errors[:count], curves)
        inside.append(final.quantile(0.1) <= curve.errors[-1] <= final.quantile(0.9))
    assert 0.72 <= np.mean(inside) <= 0.92


def test_interval_narrows_and_is_narrow_for_steady_curves() -> None:
    curves = make_curves(1, 12, 6)
    steady = -0.3 * np.log(SHARES)
    rough = steady + 0.1 * np.random.default_rng(0).standard_normal(len(SHARES))

    def width(errors: np.ndarray, count: int) -> float:
        final = extrapolate(SHARES[:count], errors[:count], curves)
        return final.quantile(0.9) - final.quantile(0.1)

    assert width(steady, 30) < width(steady, 5) / 2
    assert width(steady, 20) < width(rough, 20)
    assert extrapolate(SHARES[:20], steady[:20], curves).quantile(0.5) == pytest.approx(0, abs=0.1)


def test_groups_have_equal_weights_and_the_same_curves_the_same_bits() -> None:
    curves = make_curves(1, 6, 4)
    repeated = [*curves, *curves[:4] * 5]
    first = extrapolate(SHARES[:9], curves[0].errors[:9], curves)
    again = extrapolate(SHARES[:9], curves[0].errors[:9], curves)
    assert first.samples.tobytes() == again.samples.tobytes()
    assert first.weights.sum() == pytest.approx(1)
    weights = extrapolate(SHARES[:9], curves[0].errors[:9], repeated).weights
    assert np.sum(np.sort(weights)[:24]) == pytest.approx(1 / 6)


def test_chance_grows_with_the_error_and_is_never_zero() -> None:
    final = FinalError(np.array([0.0, 1.0]), np.array([0.5, 0.5]), 0.1)
    chances = [final.chance_below(error) for error in (-2.0, 0.5, 3.0)]
    assert 0 < chances[0] < 1e-6
    assert chances[1] == pytest.approx(0.5)
    assert chances[2] == pytest.approx(1, abs=1e-6)
    assert final.limit(0.5).samples.tolist() == [0.0, 0.5]


def test_chance_of_a_pruner_is_the_highest_of_the_last_points_and_both_tables() -> None:
    shipped, done = make_curves(1, 6, 4), make_curves(5, 4, 1)
    errors = shipped[0].errors
    count = 12
    expected = max(
        extrapolate(SHARES[:n], errors[:n], curves).chance_below(-0.5)
        for n in (10, 11, 12)
        for curves in (shipped, [*shipped, *done])
    )
    found = find_highest_chance(SHARES[:count], errors[:count], shipped, done, -0.5)
    assert found == expected
    few = MIN_POINTS + CONFIRMATIONS - 2
    assert find_highest_chance(SHARES[:few], errors[:few], shipped, done, -0.5) is None
