"""Targets in the units of the data, standardised by the training split."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from pipeline.data.columns import Targets, make_number_targets

values = arrays(np.float64, (6, 2), elements=st.floats(-1e3, 1e3, width=32)).filter(
    lambda numbers: bool((numbers.std(axis=0) > 1e-2).all())
)


@pytest.mark.slow
@given(train=values, evaluated=values)
def test_predictions_are_converted_to_data_units(train: np.ndarray, evaluated: np.ndarray) -> None:
    scaled, other, targets = make_number_targets(train, evaluated, ("a", "b"), "regression")
    assert scaled.dtype == other.dtype == np.float32
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-4)
    np.testing.assert_allclose(scaled.std(axis=0), 1, atol=1e-4)
    np.testing.assert_allclose(targets.to_data_units(scaled), train, rtol=1e-4, atol=1e-2)
    np.testing.assert_allclose(targets.to_data_units(other), evaluated, rtol=1e-4, atol=1e-2)


def test_class_outputs_have_no_units() -> None:
    outputs = np.ones((2, 3))
    assert Targets(("a", "b", "c")).to_data_units(outputs) is outputs


@pytest.mark.parametrize(
    ("train", "evaluated", "message"),
    [
        ([[1.0], [1.0]], [[2.0]], "price is the same in all training samples"),
        ([[0.1]] * 24, [[2.0]], "price is the same in all training samples"),
        ([[1.0], [np.nan]], [[2.0]], "price has values in the training split that are not finite"),
        ([[1.0], [1e300]], [[2.0]], "price has values in the training split that are not finite"),
        ([[1.0], [2.0]], [[np.inf]], "price has values in the evaluation split"),
        ([[0.0], [1e-9]], [[1e38]], "price has values in the evaluation split that overflow"),
    ],
)
def test_non_standardisable_numbers_are_refused(
    train: list[list[float]], evaluated: list[list[float]], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_number_targets(np.array(train), np.array(evaluated), ("price",), "regression")


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        (Targets(("a", "b")), "2 classes"),
        (Targets(("a", "b"), "multi_label"), "2 labels"),
        (Targets(("a",) * 1000, "next_token"), "1,000 different tokens"),
        (Targets(("price",), "regression", (2.0,), (0.5,)), "1 number (price 2 +- 0.5)"),
    ],
)
def test_target_text_names_the_task(targets: Targets, text: str) -> None:
    assert str(targets) == text
