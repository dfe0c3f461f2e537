"""Geometry of sliding kernels, against the shapes and gradients of JAX's convolutions.

The order of axes with the batch innermost.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from pipeline.models.lowerings.problem import ConvWindow, make_window, swap_layout

DIMENSIONS = ("NHWC", "HWIO", "NHWC")


@st.composite
def windows(draw: st.DrawFn) -> ConvWindow:
    small = st.integers(1, 3)
    pair = st.tuples(small, small)
    pads = st.tuples(st.integers(0, 2), st.integers(0, 2))
    padding: Any = draw(st.sampled_from(["SAME", "VALID"]) | st.tuples(pads, pads))
    sizes = draw(st.tuples(st.integers(5, 9), st.integers(5, 9)))
    return make_window(
        sizes, draw(pair), draw(pair), padding, draw(st.tuples(*[st.integers(1, 2)] * 2)), 1
    )


def convolve(window: ConvWindow, images: Any, kernel: Any) -> Any:
    return lax.conv_general_dilated(
        images,
        kernel,
        window.strides,
        window.pads,
        rhs_dilation=window.dilation,
        dimension_numbers=DIMENSIONS,
    )


@pytest.mark.medium
@given(window=windows())
def test_output_size_matches_a_convolution(window: ConvWindow) -> None:
    images = jax.ShapeDtypeStruct((1, *window.sizes, 1), np.float32)
    kernel = jax.ShapeDtypeStruct((*window.kernel, 1, 1), np.float32)
    result = jax.eval_shape(lambda x, w: convolve(window, x, w), images, kernel)
    assert window.output_size == result.shape[1:3]


@pytest.mark.parametrize("strides", [(1, 1), (2, 3)])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("padding", ["SAME", "VALID", ((1, 0), (2, 1))])
def test_transposed_window_computes_the_input_gradient(
    strides: tuple[int, int], dilation: tuple[int, int], padding: Any
) -> None:
    window = make_window((8, 9), (3, 2), strides, padding, dilation, 1)
    rng = np.random.default_rng(0)
    kernel = rng.standard_normal((3, 2, 1, 1), np.float32)
    images = np.zeros((1, 8, 9, 1), np.float32)
    result, pull = jax.vjp(lambda x: convolve(window, x, kernel), images)
    cotangent = rng.standard_normal(result.shape, np.float32)
    gradient = lax.conv_general_dilated(
        cotangent,
        kernel[::-1, ::-1],
        (1, 1),
        window.input_grad_pads,
        lhs_dilation=window.strides,
        rhs_dilation=window.dilation,
        dimension_numbers=DIMENSIONS,
    )
    np.testing.assert_allclose(gradient, pull(cotangent)[0], rtol=1e-5, atol=1e-5)
    spread = window.transpose
    assert spread.output_size == window.sizes


def test_pointwise_window_is_recognised() -> None:
    assert make_window((4, 4), (1, 1), (2, 2), "VALID", (1, 1), 1).is_pointwise
    assert not make_window((4, 4), (1, 1), (1, 1), ((1, 0), (0, 0)), (1, 1), 1).is_pointwise
    assert not make_window((4, 4), (1, 1), (1, 1), "VALID", (1, 1), 2).is_pointwise


def test_layout_swap_moves_the_batch_to_the_end_and_back() -> None:
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    moved = swap_layout(jnp.asarray(images))
    np.testing.assert_array_equal(moved, np.moveaxis(np.moveaxis(images, 0, -1), 2, 0))
    np.testing.assert_array_equal(swap_layout(moved), images)
