from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.robustness.apgd import list_windows, search
from pipeline.training.robustness.attack_losses import LOSSES, AttackedNetwork
from pipeline.training.robustness.ball import Ball, maximize


@pytest.mark.parametrize("steps", [1, 2, 5, 40, 100, 333])
def test_windows_match_the_paper(steps: int) -> None:
    """The reference implementation counts up to the window, which then becomes shorter."""
    window = max(int(0.22 * steps), 1)
    counter = 0
    for number, listed in enumerate(list_windows(steps).tolist()):
        counter += 1
        assert listed == (window if counter == window else 0), number
        if listed:
            window = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
            counter = 0


@pytest.mark.medium
def test_search_climbs_a_narrow_ridge_further_than_fixed_steps() -> None:
    """The loss has a maximum inside the ball, past which steps of the radius jump."""
    target = np.full((4, 2, 2, 1), 0.5, np.float32) + np.linspace(0, 0.1, 16).reshape(4, 2, 2, 1)
    labels = jnp.zeros(4, jnp.int32)

    def predict(pixels: jax.Array) -> jax.Array:
        distance = jnp.square(pixels - target).sum(axis=(1, 2, 3))
        return jnp.stack([10 * distance, -20 * distance, jnp.full_like(distance, -5.0)], axis=-1)

    attacked = AttackedNetwork(predict, labels)
    images = jnp.full((4, 2, 2, 1), 0.3)
    ball = Ball("linf", 0.4, images)
    found, fooled = search(attacked, LOSSES["ce"], ball, images, 60)
    assert not fooled.any()

    def objective(points: jax.Array) -> jax.Array:
        return LOSSES["ce"](predict(points), labels)

    fixed = maximize(objective, ball, images, 60, 0.15)
    assert (objective(found) >= objective(fixed) - 1e-6).all()
    np.testing.assert_allclose(found, target, atol=0.03)
