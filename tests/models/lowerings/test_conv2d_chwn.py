from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pipeline.models.lowerings.conv2d_chwn import conv2d_chwn
from tests.models.build import random

Convolve = Callable[..., jax.Array]

TOLERANCE = 1e-5
"""Of the largest value: sums of some hundred float32 products in another order."""


def native(images: jax.Array, kernel: jax.Array, **how: Any) -> jax.Array:
    """XLA's own convolution, told of the layout. Explicit pads are made beforehand: of the gradient
    of a convolution with pads of (2, 0) around windows of 2 it makes something else."""
    padding = how["padding"]
    if not isinstance(padding, str):
        images, padding = jnp.pad(images, ((0, 0), *padding, (0, 0))), "VALID"
    return lax.conv_general_dilated(
        images,
        kernel,
        how["strides"],
        padding,
        rhs_dilation=how.get("dilation", (1, 1)),
        dimension_numbers=("CHWN", "HWIO", "CHWN"),
    )


def results(
    convolve: Convolve, images: np.ndarray, kernel: np.ndarray, **how: Any
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result and both gradients of a sum in which every result weighs differently."""

    def run(images: jax.Array, kernel: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        y, pull = jax.vjp(lambda *operands: convolve(*operands, **how), images, kernel)
        weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
        return y, *pull(weights.astype(y.dtype))

    return jax.jit(run, compiler_options={"xla_backend_optimization_level": "0"})(images, kernel)


def assert_native(images: np.ndarray, kernel: np.ndarray, **how: Any) -> None:
    ours, natives = (results(f, images, kernel, **how) for f in (conv2d_chwn, native))
    for our, theirs in zip(ours, natives, strict=True):
        assert our.shape == theirs.shape
        largest = np.abs(theirs).max() if theirs.size else 0.0
        np.testing.assert_allclose(our, theirs, rtol=0, atol=TOLERANCE * largest)


PADDINGS = ("SAME", "VALID", ((1, 0), (2, 3)))
"""In every pair with a size and with a stride. Random windows of up to 3x3 have other combinations.
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "stride", "padding"),
    [
        (size, stride, PADDINGS[(row + column + 2) % 3])
        for row, size in enumerate((1, 3, 5, 7))
        for column, stride in enumerate((1, 2, 3))
    ],
)
def test_chwn_convolution_and_gradients_match_native(size: int, stride: int, padding: Any) -> None:
    images, kernel = random(3, 9, 8, 4), random(size, size, 3, 5, seed=1)
    assert_native(images, kernel, strides=(stride, stride), padding=padding)


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 3, 5, 7])
def test_single_channel_is_computed_without_a_product(size: int) -> None:
    images, kernel = random(1, 9, 8, 4), random(size, size, 1, 5, seed=1)
    assert_native(images, kernel, strides=(1, 1), padding="SAME")
    text = str(jax.make_jaxpr(conv2d_chwn)(images, kernel))
    assert "dot_general" not in text


SMALL = st.integers(1, 3)
EDGES = st.tuples(st.integers(0, 4), st.integers(0, 4))


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    sizes=st.tuples(st.integers(5, 9), st.integers(5, 9)),
    window=st.tuples(SMALL, SMALL),
    strides=st.tuples(SMALL, SMALL),
    dilation=st.tuples(st.integers(1, 2), st.integers(1, 2)),
    padding=st.one_of(st.sampled_from(["SAME", "VALID"]), st.tuples(EDGES, EDGES)),
    channels=SMALL,
)
def test_random_windows_match_native(
    sizes: tuple[int, int], window: tuple[int, int], channels: int, **how: Any
) -> None:
    images, kernel = random(channels, *sizes, 3), random(*window, channels, 2, seed=1)
    assert_native(images, kernel, **how)


@pytest.mark.slow
@pytest.mark.parametrize("channels", [1, 3])
def test_bfloat16_is_computed_in_float32_and_rounded_once(channels: int) -> None:
    def narrow(*shape: int, seed: int) -> np.ndarray:
        return random(*shape, seed=seed).astype(jnp.bfloat16)

    images, kernel = narrow(channels, 9, 9, 4, seed=0), narrow(5, 5, channels, 6, seed=1)
    cotangent = narrow(6, 5, 5, 4, seed=2)

    @jax.jit
    def run(*arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        how: dict[str, Any] = {"strides": (2, 2), "padding": "SAME"}
        y, pull = jax.vjp(lambda *operands: conv2d_chwn(*operands, **how), *arrays[:2])
        return y, *pull(arrays[2])

    wide = run(*(array.astype(np.float32) for array in (images, kernel, cotangent)))
    for once, exact in zip(run(images, kernel, cotangent), wide, strict=True):
        assert once.dtype == jnp.bfloat16
        np.testing.assert_array_equal(once, exact.astype(jnp.bfloat16))


def in_a_loop() -> str:
    """Ten steps of descent on two kernels, as one compiled program."""

    def loss(kernels: tuple[jax.Array, jax.Array], images: jax.Array) -> jax.Array:
        for kernel in kernels:
            how: dict[str, Any] = {"strides": (1, 1), "padding": "VALID"}
            images = jax.nn.relu(conv2d_chwn(images, kernel, **how))
        return (images**2).sum()

    def steps(kernels: Any, images: jax.Array) -> Any:
        def step(_: int, kernels: Any) -> Any:
            return jax.tree.map(lambda k, g: k - 1e-3 * g, kernels, jax.grad(loss)(kernels, images))

        return lax.fori_loop(0, 10, step, kernels)

    kernels = random(3, 3, 1, 4, seed=1), random(3, 3, 4, 5, seed=2)
    text = jax.jit(steps).lower(kernels, random(1, 9, 9, 8)).compile().as_text()
    assert text is not None
    return text


@pytest.mark.slow
def test_patches_in_a_loop_are_made_once_and_unused_gradients_never() -> None:
    text = in_a_loop()
    assert not re.findall(r" convolution\(", text)
    assert Counter(re.findall(r"to_apply=%_([a-z_]+?)[_.\d]*, frontend", text)) == {
        "sum_shifted": 1,
        "multiply_patches": 1,
        "shift_columns": 2,
        "shift_rows": 2,
        "compute_weight_grad": 2,
        "spread_columns": 1,
        "multiply_rows": 1,
        "add_overlaps": 1,
    }
