from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.robustness.attack_losses import AttackedNetwork
from pipeline.training.robustness.ball import Ball
from pipeline.training.robustness.square import list_sides, search_squares


def test_square_sides_match_the_paper() -> None:
    sides = list_sides(10_000, 32, 32)
    shares = {0: 0.8, 30: 0.4, 100: 0.2, 300: 0.1, 800: 0.05, 1500: 0.025, 9000: 0.8 / 512}
    for step, share in shares.items():
        assert sides[step] == max(1, round((share * 1024) ** 0.5)), step
    # Fewer steps have the same course.
    np.testing.assert_array_equal(list_sides(100, 32, 32), sides[::100])
    assert list_sides(3, 2, 9).max() <= 2


@pytest.mark.medium
def test_square_search_succeeds_without_gradients() -> None:
    """The prediction changes with the sign of the mean change, and has no gradient."""
    images = jnp.full((6, 8, 8, 2), 0.5)

    def predict(pixels: jax.Array) -> jax.Array:
        change = jnp.round(100 * (pixels.mean(axis=(1, 2, 3)) - 0.57)) / 100
        return jnp.stack([-change, change, jnp.full_like(change, -9.0)], axis=-1)

    attacked = AttackedNetwork(predict, jnp.zeros(6, jnp.int32))
    assert not jax.grad(lambda p: predict(p).sum())(images).any()
    seed = jnp.array([0, 0], jnp.uint32)
    end, fooled = search_squares(attacked, Ball("linf", 0.1, images), seed, jnp.arange(6), 200)
    assert fooled.sum() >= 5
    np.testing.assert_allclose(np.abs(end - images), 0.1, atol=1e-6)
