"""The Square attack: random squares of the radius, which stay if `compute_margin` grows.

Andriushchenko et al. 2020, arXiv 1912.00049, algorithm 2, for linf. It reads no gradients.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.training.robustness.attack_losses import AttackedNetwork, compute_margin
from pipeline.training.robustness.ball import Ball, draw_uniforms

FIRST_SHARE = 0.8
"""Share of the pixels in the first squares."""
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Steps, of 10,000, after which the share is halved."""
STRIPES_DRAW = 1
SQUARES_DRAW = 2
"""Numbers of the draws of the first image and of the squares."""


def list_sides(steps: int, height: int, width: int) -> np.ndarray:
    """Return the side of the square of each step in pixels, int32 (steps,)."""
    scaled = np.arange(steps) * 10_000 // steps
    halvings = (scaled[:, None] > np.array(HALVINGS)).sum(axis=1)
    sides = np.sqrt(FIRST_SHARE / 2.0**halvings * height * width).round()
    return np.clip(sides, 1, min(height, width)).astype(np.int32)


def search_squares(
    attacked: AttackedNetwork, ball: Ball, seed: Array, sample: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the linf ball, and whether their predictions are wrong, bool (B,).

    `seed`, uint32 (2,), and `sample`, int32 (B,), are the key of the draws.
    """
    height, width, channels = shape = ball.images.shape[1:]
    sides = jnp.asarray(list_sides(steps, height, width))
    stripes = draw_uniforms(seed, 0, sample, STRIPES_DRAW, width * channels)
    signs = jnp.where(stripes < 0.5, -1.0, 1.0).reshape(-1, 1, width, channels)
    start = ball.project(ball.images + ball.radius * jnp.broadcast_to(signs, (len(signs), *shape)))
    rows = jnp.arange(height)[:, None, None]
    columns = jnp.arange(width)[:, None]

    def paint(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        points, margins = carry
        side = sides[number]
        draws = draw_uniforms(seed, number, sample, SQUARES_DRAW, 2 + channels)
        num_places = jnp.array([height, width]) - side + 1
        first = jnp.floor(draws[:, :2] * num_places).astype(jnp.int32)
        row = rows - first[:, 0, None, None, None]
        column = columns - first[:, 1, None, None, None]
        is_inside = (row >= 0) & (row < side) & (column >= 0) & (column < side)
        sign = jnp.where(draws[:, 2:] < 0.5, -1.0, 1.0)[:, None, None, :]
        painted = ball.project(jnp.where(is_inside, ball.images + ball.radius * sign, points))
        new_margins = compute_margin(attacked.predict(painted), attacked.labels)
        # An image with a wrong prediction doesn't change any more.
        is_better = (new_margins > margins) & (margins <= 0)
        points = jnp.where(is_better[:, None, None, None], painted, points)
        return points, jnp.where(is_better, new_margins, margins)

    margins = compute_margin(attacked.predict(start), attacked.labels)
    end, _ = jax.lax.fori_loop(0, steps, paint, (start, margins))
    return end, attacked.is_fooled(end)
