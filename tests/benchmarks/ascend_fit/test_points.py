"""Candidates for a step's time are compared without the family that they are scored on."""

from __future__ import annotations

import math

import pytest

from benchmarks.ascend_fit.points import (
    CANDIDATES,
    Prediction,
    compare_networks,
    cross_validate,
    format_scores,
    predict,
)
from benchmarks.ascend_fit.populations import Deviation

EQUAL = [Deviation(f"n{number}", number % 2 == 0, math.log(4)) for number in range(8)]


def test_candidates_match_hand_calculation() -> None:
    (row,) = predict(EQUAL, [Deviation("new", True, math.log(2))])
    factors = [math.exp(row.expected[name]) for name in CANDIDATES]
    assert factors[:5] == pytest.approx([1, 4, 4, 2, 4], rel=1e-3)
    assert factors[5] == pytest.approx(4 * math.exp(-(row.log_sd**2)), rel=1e-3)
    errors = [row.measure_error(name) for name in CANDIDATES]
    assert errors[:5] == pytest.approx([0.5, 1, 1, 0, 1], abs=1e-2)


def test_family_is_predicted_without_its_rows() -> None:
    """A family with other ratios changes nothing in its prediction."""
    families = ["a"] * 6 + ["b"] * 2
    far = [*EQUAL[:6], *(Deviation(row.network, row.eager, 9.0) for row in EQUAL[6:])]
    for rows in (EQUAL, far):
        predictions = cross_validate(rows, families)
        assert [row.network for row in predictions] == [row.network for row in EQUAL]
        for row in predictions[6:]:
            assert row.expected[CANDIDATES[2]] == pytest.approx(math.log(4), abs=1e-3)
    assert predictions[0].expected[CANDIDATES[1]] > math.log(4) + 0.1


def test_better_candidate_wins_every_draw() -> None:
    expected = dict.fromkeys(CANDIDATES, 1.0) | {CANDIDATES[0]: 0.1}
    rows = [Prediction(f"n{number}", 0.0, expected, 0.5) for number in range(5)]
    assert compare_networks(rows, CANDIDATES[0], CANDIDATES[2]) == 1
    assert compare_networks(rows, CANDIDATES[2], CANDIDATES[0]) == 0
    text = format_scores("part", rows)
    assert "part: 5 rows of 5 networks" in text
    assert "| as modelled | 10.5% | 10.5% | 0.100 |" in text
    assert "0 of 5 rows are inside" in text
