"""The fit recovers its data's parameters, and bounds are one-sided."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from benchmarks.ascend_fit.calibrate import Parts, fit, left_out_errors, measure_spread, quantile
from pipeline.backends.ascend.cost.efficiency import GROUPS
from pipeline.backends.ascend.published.workloads import load_published_steps

ROW = load_published_steps()[0]


def part(
    groups: list[float], ms: float, family: str, quality: str = "device", tasks: float = 0.1
) -> Parts:
    row = replace(ROW, id=family, family=family, ms=ms, quality=quality)
    return Parts(row, np.array(groups), tasks, 1.0, 0.1)


def rows_from(truth: np.ndarray, count: int = 12) -> list[Parts]:
    """Rows whose published times follow exactly from the parameters, each group slow in some."""
    parts = []
    for index in range(count):
        groups = [1.0] * len(GROUPS)
        groups[index % len(GROUPS)] = 40.0
        draft = part(groups, 1.0, f"family{index}", tasks=0.2 + 0.3 * (index % 3))
        ms = draft.step_ms(truth)
        parts.append(replace(draft, row=replace(draft.row, ms=ms)))
    return parts


def test_fit_moves_from_the_priors_towards_the_rows():
    truth = np.append(np.full(len(GROUPS), 0.1), 1.0)
    found = fit(rows_from(truth, 200))
    assert np.all((found[:-1] > 0.05) & (found[:-1] < 0.1))


def test_rows_explained_by_the_priors_do_not_change_them():
    truth = np.append(np.zeros(len(GROUPS)), 1.0)
    assert fit(rows_from(truth)) == pytest.approx(truth, abs=1e-6)


def test_met_bound_is_not_reported():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    bound = part([10.0] * len(GROUPS), 1e6, "bounded", "at_most")
    assert fit([*rows, bound]) == pytest.approx(fit(rows))


def test_violated_bound_makes_the_model_faster():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    bounds = [part([10.0] * len(GROUPS), 20.0, f"b{i}", "at_most") for i in range(50)]
    assert np.all(fit([*rows, *bounds])[:-1] > 0.01)


def test_left_out_errors_are_zero_if_every_family_agrees():
    rows = rows_from(np.append(np.zeros(len(GROUPS)), 1.0))
    assert left_out_errors(rows) == pytest.approx(np.zeros(len(rows)), abs=1e-6)


@pytest.mark.slow
def test_spread_covers_four_fifths_of_the_rows():
    rows = [
        part([10.0] * len(GROUPS), 41.1 * factor, f"f{factor}")
        for factor in np.linspace(0.7, 1.4, 15)
    ]
    log_sd, scale = measure_spread(rows)
    errors = np.abs(left_out_errors(rows))
    half_width = 1.2816 * scale * np.hypot(0.1, log_sd)
    assert np.mean(errors <= half_width + 1e-12) == pytest.approx(0.8)


def test_weighted_quantile_matches_hand_calculation():
    values, weights = np.array([3.0, 1.0, 2.0]), np.array([1.0, 1.0, 2.0])
    assert quantile(values, weights, 0.5) == 2.0
    assert quantile(values, weights, 0.2) == 1.0
    assert quantile(values, weights, 1.0) == 3.0
