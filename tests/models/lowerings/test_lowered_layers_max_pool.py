from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from pipeline.models.lowerings.lowered_layers import max_pool
from tests.models.build import random

Pair = tuple[int, int]

UNPADDED = ((0, 0), (0, 0))


def by_loops(
    images: np.ndarray, window: Pair, strides: Pair, pads: tuple[Pair, Pair]
) -> np.ndarray:
    padded = np.pad(images, ((0, 0), *pads, (0, 0)), constant_values=-np.inf)
    height = (padded.shape[1] - window[0]) // strides[0] + 1
    width = (padded.shape[2] - window[1]) // strides[1] + 1
    y = np.zeros((len(images), height, width, images.shape[3]), np.float32)
    for row, column in np.ndindex(height, width):
        top, left = row * strides[0], column * strides[1]
        y[:, row, column] = padded[:, top : top + window[0], left : left + window[1]].max((1, 2))
    return y


@pytest.mark.slow
@pytest.mark.parametrize(
    ("window", "strides", "pads"),
    [
        ((2, 2), (2, 2), UNPADDED),
        ((3, 3), (2, 2), ((0, 1), (1, 1))),
        ((3, 2), (1, 3), UNPADDED),
        ((1, 1), (2, 2), UNPADDED),
    ],
)
def test_max_pool_is_the_maximum_of_every_window(
    window: Pair, strides: Pair, pads: tuple[Pair, Pair]
) -> None:
    images = random(2, 7, 8, 3) - 5
    y = max_pool(images, window, strides, pads)
    np.testing.assert_array_equal(y, by_loops(images, window, strides, pads))


@pytest.mark.slow
def test_gradient_matches_reduce_window() -> None:
    images, pads = random(2, 7, 8, 3), ((0, 0), (1, 1), (1, 0), (0, 0))

    def reduced(images: jax.Array) -> jax.Array:
        return lax.reduce_window(images, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), pads)

    y, pull = jax.vjp(reduced, images)
    cotangent = random(*y.shape, seed=1)
    _, ours = jax.vjp(lambda images: max_pool(images, (3, 3), (2, 2), pads[1:3]), images)
    np.testing.assert_allclose(ours(cotangent)[0], pull(cotangent)[0], rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(values=st.lists(st.integers(0, 2), min_size=16, max_size=16))
def test_gradient_of_each_window_sums_to_one_at_its_maxima(values: list[int]) -> None:
    images = np.array(values, np.float32).reshape(1, 4, 4, 1)
    y, pull = jax.vjp(lambda images: max_pool(images, (2, 2), (2, 2), UNPADDED), images)
    (gradient,) = pull(np.ones(y.shape, np.float32))
    windows = np.asarray(gradient).reshape(2, 2, 2, 2).sum((1, 3))
    np.testing.assert_array_equal(windows, 1)
    largest = images == np.asarray(y).repeat(2, axis=1).repeat(2, axis=2)
    assert not np.asarray(gradient)[~largest].any()
