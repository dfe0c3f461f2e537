"""The fit to published steps ends at the minimum of its loss; priors hold where no row speaks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import yaml

from benchmarks.ascend_fit.calibrate import (
    HUBER,
    PRIOR_LOG_SD,
    PROBES,
    TASK_US_PRIOR,
    Parts,
    fit,
    split_by_group,
    unit_ms,
)
from pipeline.backends.ascend.cost.efficiency import CALIBRATION_FILE, GROUPS
from pipeline.backends.ascend.published.workloads import Quality, load_published_steps

PRIOR = np.array([0.0] * len(GROUPS) + [TASK_US_PRIOR[0]])
SPREADS = [PRIOR_LOG_SD[group] for group in GROUPS]


@pytest.mark.slow
def test_calibration_is_current() -> None:
    """Else `python -m benchmarks.ascend_fit.calibrate` has to be run again."""
    probes = yaml.safe_load(CALIBRATION_FILE.read_text())["probes"]
    assert set(probes) == set(PROBES)
    for row in load_published_steps():
        if row.id in probes:
            assert unit_ms(split_by_group(row)) == pytest.approx(probes[row.id], rel=1e-3)


def _parts(log_errors: list[float], quality: Quality = "device") -> list[Parts]:
    """Rows of one family, modelled wrong by these factors at the priors."""
    parts = []
    for at, error in enumerate(log_errors):
        groups = np.roll([4.0, 1.0, 2.0, 0.5], at)
        modelled = 1.0 + groups.sum() + 0.3 * TASK_US_PRIOR[0]
        row = replace(
            load_published_steps()[0],
            family="one",
            ms=float(modelled * np.exp(-error)),
            quality=quality,
        )
        parts.append(Parts(row, groups, 0.3, 1.0, 0.1))
    return parts


def _loss(parts: list[Parts], point: np.ndarray) -> float:
    """Huber's loss of the rows, and the priors'; one family, rows of the device alone."""
    total = 0.0
    for part in parts:
        size = abs(np.log(part.step_ms(point) / part.row.ms)) / HUBER
        total += (size**2 / 2 if size < 1 else size - 0.5) / len(parts) ** 0.5
    return total + (((point - PRIOR) / [*SPREADS, TASK_US_PRIOR[1]]) ** 2).sum() / 2


@pytest.mark.parametrize("errors", [[0.1, -0.05, 0.15], [0.1, -0.6, 0.4, 0.9, 0.02]])
def test_fit_is_a_local_minimum(errors: list[float]) -> None:
    parts = _parts(errors)
    point = fit(parts)
    assert _loss(parts, point) < _loss(parts, PRIOR)
    for step in 1e-3 * np.vstack([np.eye(len(point)), -np.eye(len(point))]):
        assert _loss(parts, point) < _loss(parts, point + step)


@pytest.mark.parametrize(("quality", "error"), [("device", 0.0), ("at_most", -0.5)])
def test_exact_rows_and_met_bounds_do_not_change_the_priors(quality: Quality, error: float) -> None:
    assert fit(_parts([error] * 3, quality)) == pytest.approx(PRIOR, abs=1e-6)


def test_exceeded_bound_counts_like_an_error() -> None:
    exceeded = fit(_parts([0.3] * 3, "at_most"))
    assert exceeded == pytest.approx(fit(_parts([0.3] * 3)))
    assert exceeded[-1] < TASK_US_PRIOR[0]


@pytest.mark.medium
def test_fitted_task_time_is_never_negative() -> None:
    assert fit(_parts([9.0] * 400))[-1] >= 0
