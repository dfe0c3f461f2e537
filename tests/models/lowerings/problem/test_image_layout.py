"""The order of axes with the batch innermost."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np

from pipeline.models.lowerings.problem.image_layout import swap_layout


def test_layout_swap_moves_the_batch_to_the_end_and_back() -> None:
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    moved = swap_layout(jnp.asarray(images))
    np.testing.assert_array_equal(moved, np.moveaxis(np.moveaxis(images, 0, -1), 2, 0))
    np.testing.assert_array_equal(swap_layout(moved), images)
