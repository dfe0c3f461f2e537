from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.state import Record
from pipeline.training.telemetry import COLUMNS, Telemetry, stacked


def rows(*losses: float, grad_norm: float = 1.0) -> np.ndarray:
    """Rows of the device's buffer, made of records as the step makes them."""
    records = [Record(loss, 0.01, grad_norm, 1.0) for loss in losses]
    return np.array(records, np.float32)


def test_columns_are_those_of_a_record() -> None:
    records = [Record(1.0, 0.25, 3.0, 128.0), Record(0.5, 0.125, 2.0, 64.0)]
    telemetry = Telemetry.from_rows(7, np.array(records, np.float32))
    assert (telemetry.start, len(telemetry)) == (7, 2)
    for name in Record._fields:
        column = getattr(telemetry, name)
        assert column.dtype == np.float32
        assert column.tolist() == [getattr(record, name) for record in records]


def test_parts_are_stacked_with_the_steps_they_are_of() -> None:
    assert Record._fields == COLUMNS
    parts = [Telemetry.from_rows(7, rows(2.0, 1.0)), Telemetry.from_rows(20, rows(0.5))]
    steps, records = stacked(parts)
    assert steps.tolist() == [8, 9, 21]
    assert records.dtype == np.float32
    assert records.tolist() == rows(2.0, 1.0, 0.5).tolist()


def test_columns_are_float32_whatever_the_rows_are() -> None:
    telemetry = Telemetry.from_rows(0, np.full((1, 5), 0.1, np.float64))
    assert telemetry.loss.dtype == np.float32
    assert telemetry.loss[0] == np.float32(0.1)


def test_rows_of_another_width_are_refused() -> None:
    with pytest.raises(ValueError, match="unpack"):
        Telemetry.from_rows(0, np.zeros((2, 6), np.float32))


def test_a_clean_sink_has_no_bad_step() -> None:
    telemetry = Telemetry.from_rows(0, rows(2.0, 1.0))
    assert telemetry.finite.tolist() == [True, True]
    assert telemetry.bad_step is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_the_first_bad_loss_is_named_by_its_true_step(bad: float) -> None:
    telemetry = Telemetry.from_rows(100, rows(2.0, bad, 1.0, bad))
    assert telemetry.finite.tolist() == [True, False, True, False]
    assert telemetry.bad_step == 102


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_is_bad_too(bad: float) -> None:
    assert Telemetry.from_rows(0, rows(2.0, grad_norm=bad)).bad_step == 1


def test_learning_rate_and_loss_scale_decide_nothing() -> None:
    broken = np.array([[1.0, np.nan, 1.0, np.inf, 0.0]], np.float32)
    assert Telemetry.from_rows(0, broken).bad_step is None


def test_a_skipped_step_is_not_bad() -> None:
    records = [Record(1.0, 0.1, np.inf, 8.0, 1.0), Record(np.nan, 0.1, np.nan, 4.0, 0.0)]
    telemetry = Telemetry.from_rows(3, np.array(records, np.float32))
    assert telemetry.finite.tolist() == [False, False]
    assert telemetry.bad_step == 5
