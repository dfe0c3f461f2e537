from __future__ import annotations

from math import sqrt
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.core.registry import list_components

DENSE = (300, 200)
CONV = (3, 3, 40, 80)
FAN_IN, FAN_OUT = 3 * 3 * 40, 3 * 3 * 80


def draw(name: str, shape: tuple[int, ...] = DENSE, **fields: Any) -> np.ndarray:
    initializer = list_components("initializer")[name].model_validate({"name": name, **fields})
    values = initializer.build()(jax.random.key(3), shape, jnp.float32)
    assert values.shape == shape
    assert values.dtype == jnp.float32
    return np.asarray(values)


def assert_deviation(values: np.ndarray, expected: float) -> None:
    assert values.std() == pytest.approx(expected, rel=0.02)
    assert abs(values.mean()) < 4 * expected / sqrt(values.size)


def test_list_of_tested_initializers_is_complete() -> None:
    assert set(list_components("initializer")) == {
        "constant",
        "he_normal",
        "he_uniform",
        "normal",
        "ones",
        "truncated_normal",
        "uniform",
        "xavier_normal",
        "xavier_uniform",
        "zeros",
    }


@pytest.mark.slow
def test_truncated_normal_is_cut_at_two_sigma_without_rescaling() -> None:
    values = draw("truncated_normal", sigma=0.02)
    assert 0.0398 < np.abs(values).max() <= 0.04
    density = np.exp(-2) / sqrt(2 * np.pi)
    inside = 0.9544997361036416
    assert_deviation(values, 0.02 * sqrt(1 - 4 * density / inside))


@pytest.mark.slow
def test_normal_has_the_given_mean_and_deviation() -> None:
    values = draw("normal", sigma=0.5, mean=2.0)
    assert_deviation(values - 2, 0.5)
    assert np.abs(values - 2).max() > 1.5


@pytest.mark.slow
def test_uniform_range_is_plus_minus_scale() -> None:
    values = draw("uniform", scale=0.3)
    assert -0.3 <= values.min() < -0.299
    assert 0.299 < values.max() < 0.3
    assert_deviation(values, 0.3 / sqrt(3))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fan"), [("fan_in", FAN_IN), ("fan_out", FAN_OUT)])
def test_he_normal_deviation_is_gain_over_root_fan(mode: str, fan: int) -> None:
    values = draw("he_normal", CONV, mode=mode)
    assert_deviation(values, sqrt(2 / fan))
    assert np.abs(values).max() > 3.5 * sqrt(2 / fan)


@pytest.mark.medium
def test_he_normal_supports_the_gain_of_a_leaky_relu() -> None:
    assert_deviation(draw("he_normal", negative_slope=0.5), sqrt(2 / 1.25 / 300))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "fan"), [("fan_in", FAN_IN), ("fan_out", FAN_OUT)])
def test_he_uniform_of_slope_root_5_is_bounded_by_one_over_root_fan(mode: str, fan: int) -> None:
    values = draw("he_uniform", CONV, mode=mode)
    bound = 1 / sqrt(fan)
    assert 0.999 * bound < np.abs(values).max() <= bound * (1 + 1e-6)
    assert_deviation(values, bound / sqrt(3))


@pytest.mark.slow
def test_he_uniform_supports_other_slopes() -> None:
    assert_deviation(draw("he_uniform", negative_slope=0.0), sqrt(2 / 300))


def test_xavier_normal_has_the_variance_of_both_fans() -> None:
    values = draw("xavier_normal", gain=2.0)
    assert_deviation(values, 2 * sqrt(2 / (300 + 200)))
    assert np.abs(values).max() > 3.5 * 2 * sqrt(2 / 500)


@pytest.mark.medium
def test_xavier_uniform_is_bounded_by_both_fans() -> None:
    bound = sqrt(6 / (FAN_IN + FAN_OUT))
    values = draw("xavier_uniform", CONV)
    assert 0.999 * bound < np.abs(values).max() <= bound * (1 + 1e-6)
    assert_deviation(values, bound / sqrt(3))


@pytest.mark.parametrize(
    ("name", "fields", "value"),
    [("constant", {"value": 1.5}, 1.5), ("zeros", {}, 0.0), ("ones", {}, 1.0)],
)
def test_constant_initializers_fill_with_their_value(name: str, fields: Any, value: float) -> None:
    np.testing.assert_array_equal(draw(name, (7,), **fields), np.full(7, value, np.float32))


@pytest.mark.parametrize("name", ["he_normal", "he_uniform", "xavier_normal", "xavier_uniform"])
def test_fan_scaled_initializers_refuse_a_bias(name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name} scales by .* shape \(6,\) has 1 of two axes"):
        draw(name, (6,))


@pytest.mark.parametrize(
    ("name", "fields"),
    [
        ("truncated_normal", {"sigma": 0.0}),
        ("normal", {"sigma": -1.0}),
        ("uniform", {"scale": 0.0}),
        ("he_normal", {"mode": "fan_avg"}),
        ("he_uniform", {"negative_slope": -1.0}),
        ("xavier_normal", {"gain": 0.0}),
        ("constant", {}),
    ],
)
def test_invalid_initializer_values_are_refused(name: str, fields: Any) -> None:
    with pytest.raises(ValidationError):
        list_components("initializer")[name].model_validate({"name": name, **fields})
