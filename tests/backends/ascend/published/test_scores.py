"""Scores of rows, by hand and by numeric integration."""

from __future__ import annotations

import math
from itertools import combinations
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.published.scores import PricedRow, kendall_tau, score
from pipeline.backends.ascend.published.workloads import load_published_steps


def test_score_matches_hand_calculation() -> None:
    row = load_published_steps()[0]
    priced_rows = [
        PricedRow(row, row.ms * factor, row.ms * low, row.ms * 2)
        for factor, low in ((1.1, 0.5), (0.8, 0.5), (1.5, 1.2))
    ]
    found = score(priced_rows)
    assert (found.rows, found.median_error, found.worst_error) == pytest.approx((3, 0.2, 0.5))
    assert found.mean_error == pytest.approx(0.8 / 3)
    assert found.coverage == pytest.approx(2 / 3)
    assert found.crps == pytest.approx(np.mean([priced_row.crps for priced_row in priced_rows]))
    quantiles = sorted(NormalDist().cdf(priced_row.deviation) for priced_row in priced_rows)
    steps = [
        abs(quantile - place / 3)
        for number, quantile in enumerate(quantiles)
        for place in (number, number + 1)
    ]
    assert found.ks == pytest.approx(max(steps))


@pytest.mark.medium
@given(st.floats(0.3, 3.0), st.floats(1.1, 4.0))
def test_crps_matches_numeric_integration(ratio: float, width: float) -> None:
    row = load_published_steps()[0]
    modelled = row.ms * ratio
    priced_row = PricedRow(row, modelled, modelled / width, modelled * width)
    normal = NormalDist(math.log(modelled), priced_row.log_sd)
    logs = np.linspace(math.log(row.ms) - 12, math.log(row.ms) + 12, 40_001)
    reached = np.array([normal.cdf(log) for log in logs[::10]])
    steps = (logs[::10] >= math.log(row.ms)).astype(float)
    assert priced_row.crps == pytest.approx(
        np.trapezoid((reached - steps) ** 2, logs[::10]), abs=5e-3
    )
    if abs(priced_row.deviation) != pytest.approx(1.2816):
        assert priced_row.inside == (abs(priced_row.deviation) < 1.2816)


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), min_size=2, max_size=12))
def test_kendall_tau_matches_counted_pairs(points: list[tuple[int, int]]) -> None:
    signs = [np.sign(a[0] - b[0]) * np.sign(a[1] - b[1]) for a, b in combinations(points, 2)]
    untied = [sign for sign in signs if sign]
    found = kendall_tau([x for x, _ in points], [y for _, y in points])
    if untied:
        assert found == pytest.approx(sum(untied) / len(untied))
    else:
        assert math.isnan(found)
