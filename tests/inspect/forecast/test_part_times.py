"""Rough counts of parts, and measurements of parts of all types."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.inspect.forecast.part_times import (
    BYTE_NS,
    FLOP_PER_NS,
    KERNEL_NS,
    measure_us,
    rough_us,
)
from pipeline.inspect.forecast.step_parts import StepPart, parts_of

CPU = jax.devices("cpu")[0]


def only_part(function: Callable[..., Any], *args: Any) -> StepPart:
    (part,) = parts_of(jax.make_jaxpr(function)(*args), "cpu")
    return part


def ones(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.ones(shape, dtype)


@pytest.mark.parametrize(
    ("left", "right", "axes", "flops"),
    [
        ((3, 5), (5, 7), (((1,), (0,)), ((), ())), 2 * 3 * 5 * 7),
        ((2, 3, 5), (2, 7, 5), (((2,), (2,)), ((0,), (0,))), 2 * 2 * 3 * 5 * 7),
        ((2, 3, 5), (2, 3, 7), (((0, 1), (0, 1)), ((), ())), 2 * 2 * 3 * 5 * 7),
    ],
)
def test_product_time_counts_multiplications_and_additions(
    left: tuple[int, ...], right: tuple[int, ...], axes: Any, flops: int
) -> None:
    part = only_part(lambda a, b: jax.lax.dot_general(a, b, axes), ones(*left), ones(*right))
    results = part.program.jaxpr.outvars[0].aval.size
    moved = 4 * (np.prod(left) + np.prod(right) + results)
    ns = KERNEL_NS + BYTE_NS * moved + flops / FLOP_PER_NS["product"]
    assert rough_us(part) == pytest.approx(1e-3 * ns)


def test_convolution_time_counts_its_kernel_for_each_value() -> None:
    def convolve(x: Any, k: Any) -> Any:
        return jax.lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    part = only_part(convolve, ones(2, 8, 8, 3), ones(3, 3, 3, 16))
    moved = 4 * (2 * 64 * 3 + 9 * 3 * 16 + 2 * 64 * 16)
    flops = 2 * (2 * 64 * 16) * (9 * 3)
    ns = KERNEL_NS + BYTE_NS * moved + flops / FLOP_PER_NS["convolution"]
    assert rough_us(part) == pytest.approx(1e-3 * ns)


def test_exponentials_and_random_draws_cost_more_than_sums() -> None:
    x = ones(64, 64)
    added, exponential = only_part(lambda x: x + 1, x), only_part(jnp.exp, x)
    key = jax.random.key(0)
    drawn = only_part(lambda k: jax.random.bits(k, (64, 64)), key)
    assert rough_us(added) < rough_us(exponential) < rough_us(drawn)


@pytest.mark.parametrize("looped", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.int32, np.uint8, np.bool_])
def test_parts_of_any_dtype_are_timed(dtype: Any, looped: bool) -> None:
    part = only_part(lambda x: jnp.where(x > 0, x, x[::-1]), ones(64, 8, dtype=dtype))
    assert 0 < measure_us(part, CPU, looped=looped) < 1e6


def test_parts_with_keys_are_timed() -> None:
    def draw(key: Any) -> Any:
        return key, jax.random.bits(key, (8, 8))

    assert 0 < measure_us(only_part(draw, jax.random.key(0)), CPU, looped=True) < 1e6


def test_part_without_operands_is_timed() -> None:
    assert 0 < measure_us(only_part(lambda: jnp.arange(64) * 2), CPU, looped=True) < 1e6
