from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.telemetry import Telemetry, concatenate_columns
from tests.step_rows import NAMES, telemetry_of


def rows(*losses: float, grad_norm: float = 1.0) -> np.ndarray:
    """Rows of the device's buffer."""
    return np.array([[loss, 0.01, grad_norm, 1.0, 0.0] for loss in losses], np.float32)


def test_columns_are_named_as_the_rows() -> None:
    names = ("loss", "tokens", "clipped")
    telemetry = Telemetry.from_rows(7, np.array([[1, 2, 0], [3, 4, 1]]), names, {"clipped"})
    assert (telemetry.start, len(telemetry), telemetry.steps.tolist()) == (7, 2, [8, 9])
    assert {name: column.tolist() for name, column in telemetry.columns.items()} == {
        "loss": [1.0, 3.0],
        "tokens": [2.0, 4.0],
        "clipped": [False, True],
    }
    assert telemetry.take_first(1).columns["tokens"].tolist() == [2.0]


def test_telemetry_has_loss_scale_and_skipped_steps() -> None:
    telemetry = telemetry_of(0, rows(2.0, 1.0))
    assert telemetry.loss_scale.tolist() == [1.0, 1.0]
    assert telemetry.columns["skipped"].tolist() == [False, False]


def test_telemetry_without_a_loss_has_no_non_finite_step() -> None:
    telemetry = Telemetry.from_rows(0, np.array([[np.nan]]), ("tokens",))
    assert telemetry.non_finite_step is None


def test_parts_are_concatenated() -> None:
    parts = [telemetry_of(7, rows(2.0, 1.0)), telemetry_of(20, rows(0.5))]
    columns = concatenate_columns(parts)
    assert tuple(columns) == NAMES
    assert columns["loss"].dtype == np.float32
    assert columns["loss"].tolist() == [2.0, 1.0, 0.5]


def test_columns_are_float32_for_any_rows() -> None:
    telemetry = telemetry_of(0, np.full((1, 5), 0.1, np.float64))
    assert telemetry.loss.dtype == np.float32
    assert telemetry.loss[0] == np.float32(0.1)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="longer"):
        telemetry_of(0, np.zeros((2, 6), np.float32))


def test_finite_sink_has_no_non_finite_step() -> None:
    telemetry = telemetry_of(0, rows(2.0, 1.0))
    assert telemetry.classify_steps().applied.tolist() == [True, True]
    assert telemetry.non_finite_step is None


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_first_non_finite_loss_has_its_global_step(value: float) -> None:
    telemetry = telemetry_of(100, rows(2.0, value, 1.0, value))
    assert telemetry.classify_steps().applied.tolist() == [True, False, True, False]
    assert telemetry.non_finite_step == 102


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_non_finite_gradient_norm_is_a_non_finite_step(value: float) -> None:
    assert telemetry_of(0, rows(2.0, grad_norm=value)).non_finite_step == 1


def test_learning_rate_and_loss_scale_are_not_checked() -> None:
    broken = np.array([[1.0, np.nan, 1.0, np.inf, 0.0]], np.float32)
    assert telemetry_of(0, broken).non_finite_step is None


def test_skipped_step_is_not_a_non_finite_step() -> None:
    broken = np.array([[1.0, 0.1, np.inf, 8.0, 1.0], [np.nan, 0.1, np.nan, 4.0, 0.0]])
    telemetry = telemetry_of(3, broken)
    assert telemetry.classify_steps().applied.tolist() == [False, False]
    assert telemetry.non_finite_step == 5
