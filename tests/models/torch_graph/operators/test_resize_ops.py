"""Resizing to sizes whose pixels depend on how PyTorch rounds; values of torch 2.13."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.torch_graph.operator_table import to_tensor
from pipeline.models.torch_graph.operators.known_operators import OPERATORS


def resize_column(name: str, size: int, *arguments: object) -> list[float]:
    """Return the pixels of a column 0, 1, ..., size - 1 after an operator."""
    column = jnp.arange(size, dtype=jnp.float32).reshape(1, 1, size, 1)
    resized = OPERATORS[f"aten.{name}"].function(to_tensor(column), *arguments)
    return np.asarray(resized.plain()).ravel().tolist()


@pytest.mark.parametrize(
    ("size", "factor", "pixels"),
    [
        (3, 1.1, [0, 1, 2]),
        (7, 2.13, [0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6]),
        # 6 * float32(1 / 1.2) is 5 in float32, less in float64.
        (6, 1.2, [0, 0, 1, 2, 3, 4, 5]),
    ],
)
def test_nearest_pixel_by_a_factor(size: int, factor: float, pixels: list[int]) -> None:
    assert resize_column("upsample_nearest2d.vec", size, None, [factor, 1.0]) == pixels


def test_nearest_pixel_by_a_size() -> None:
    pixels = resize_column("upsample_nearest2d.vec", 2, [82, 1])
    # 41 * float32(2 / 82) is below 1.
    assert pixels == [0] * 42 + [1] * 40


def test_antialiased_aligned_corners_of_one_pixel_are_the_first() -> None:
    assert resize_column("_upsample_bilinear2d_aa.default", 8, [1, 1], True) == [0]
    expected = pytest.approx(-0.125)
    assert resize_column("_upsample_bicubic2d_aa.default", 8, [1, 1], True) == [expected]
