"""The paired test: false verdicts, its interval, and what it needs."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.study.paired_test import (
    BETS,
    ERROR,
    MIN_PAIRS,
    compute_evidence,
    compute_interval,
    count_pairs_to_decide,
    count_unpaired_runs,
)

FINITE = st.floats(-1e3, 1e3).map(lambda x: round(x, 3))
DIFFERENCES = st.lists(FINITE, min_size=1, max_size=12).map(np.array)


def test_evidence_matches_the_formula() -> None:
    differences = np.array([0.3, -0.1, 0.4])
    expected = 0.0
    for bet, share in BETS.items():
        for sign in (1, -1):
            capital = 1.0
            for index, difference in enumerate(differences):
                scale = math.sqrt(sum(differences[: index + 1] ** 2) / (index + 1))
                x = sign * bet * difference / scale
                capital *= math.exp(x) / math.cosh(x)
            expected += share / 2 * capital
    assert compute_evidence(differences)[-1] == pytest.approx(expected, rel=1e-12)


@pytest.mark.medium
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=7))
def test_mean_evidence_over_all_signs_is_one(sizes: list[float]) -> None:
    """The mean over all signs of any sizes is 1: no gain is expected without a difference."""
    signs = np.array(np.meshgrid(*[[1, -1]] * len(sizes))).reshape(len(sizes), -1).T
    finals = [compute_evidence(row * np.array(sizes))[-1] for row in signs]
    assert np.mean(finals) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("kind", ["normal", "heavy", "few values", "growing"])
def test_equal_sides_have_few_false_verdicts(kind: str) -> None:
    rng = np.random.default_rng(7)
    shape = (400, 32)
    draws = {
        "normal": rng.normal(size=shape),
        "heavy": rng.standard_t(1.2, size=shape),
        "few values": rng.integers(-1, 2, shape) / 359,
        "growing": rng.normal(size=shape) * 1.5 ** np.arange(32),
    }[kind]
    num_false = sum(count_pairs_to_decide(row) is not None for row in draws)
    assert num_false <= ERROR * 400


@pytest.mark.medium
def test_intervals_of_a_sequence_cover_the_mean() -> None:
    rng = np.random.default_rng(8)
    misses = 0
    for _ in range(24):
        draws = rng.normal(0.3, 1.0, 20)
        ends = [compute_interval(draws[:count]) for count in range(MIN_PAIRS, 21, 2)]
        misses += any(not low <= 0.3 <= high for low, high in ends)
    assert misses <= 2 * ERROR * 24 + 1


@pytest.mark.medium
@given(DIFFERENCES, FINITE, st.sampled_from([-4.0, 0.25, 2.0]))
def test_interval_shifts_and_scales_with_its_differences(
    differences: np.ndarray, shift: float, factor: float
) -> None:
    low, high = compute_interval(differences)
    ends = sorted((factor * low + shift, factor * high + shift))
    tolerance = 1e-2 * (1 + abs(factor) * float(np.ptp(differences)))
    assert compute_interval(factor * differences + shift) == pytest.approx(ends, abs=tolerance)


@pytest.mark.parametrize("count", range(MIN_PAIRS))
def test_too_few_pairs_are_undecided(count: int) -> None:
    differences = np.full(count, 0.1)
    assert compute_interval(differences) == (-math.inf, math.inf)
    assert count_pairs_to_decide(differences) is None


def test_equal_differences_decide_after_min_pairs() -> None:
    assert compute_interval(np.full(MIN_PAIRS, 0.1)) == (0.1, 0.1)
    assert count_pairs_to_decide(np.full(40, 0.1)) == MIN_PAIRS
    assert count_pairs_to_decide(np.zeros(40)) is None


@pytest.mark.medium
def test_large_effect_takes_fewer_pairs() -> None:
    rng = np.random.default_rng(9)
    noise = rng.normal(size=(24, 64))
    median = [
        np.median([count_pairs_to_decide(row + effect) or 99 for row in noise])
        for effect in (0.5, 1.0, 2.0)
    ]
    assert median[0] > 2 * median[1] > 2 * median[2]
    assert median[2] <= 7


def test_number_of_unpaired_runs_follows_the_variances() -> None:
    rng = np.random.default_rng(10)
    common = rng.normal(size=2000)
    values = common + 0.1 * rng.normal(size=2000)
    other_values = common + 0.1 * rng.normal(size=2000)
    runs = count_unpaired_runs(values, other_values)
    assert runs is not None
    assert runs / 4000 == pytest.approx(1.01 / 0.01, rel=0.1)
    assert count_unpaired_runs(values, values) is None
    assert np.ptp(values + 0.1 - values) > 0, "rounding"
    assert count_unpaired_runs(values, values + 0.1) is None
