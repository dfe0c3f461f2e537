"""The Square attack, which needs no gradients: Andriushchenko et al. 2020, arXiv 1912.00049.

A step changes a random square of the image. In the square, each channel becomes the original image
plus or minus the radius. The change is undone unless it makes `compute_margin` larger. This is the
paper's algorithm 2, for the norm linf.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.training.robustness.attack_losses import AttackedNetwork, compute_margin
from pipeline.training.robustness.ball import Ball, draw_uniforms

FIRST_SHARE = 0.8
"""Share of the image's pixels that are in the square of the first step."""
HALVINGS = (10, 50, 200, 500, 1000, 2000, 4000, 6000, 8000)
"""Steps after which the share is halved in a search of 10,000 steps; scaled for other lengths."""
# Values of the argument `op` of `draw_uniforms`.
STRIPES_DRAW = 1
SQUARES_DRAW = 2


def list_sides(steps: int, height: int, width: int) -> np.ndarray:
    """Return the side of the square of each step in pixels, int32 (steps,)."""
    scaled = np.arange(steps) * 10_000 // steps
    halvings = (scaled[:, None] > np.array(HALVINGS)).sum(axis=1)
    sides = np.sqrt(FIRST_SHARE / 2.0**halvings * height * width).round()
    return np.clip(sides, 1, min(height, width)).astype(np.int32)


def search_squares(
    attacked: AttackedNetwork, ball: Ball, seed: Array, sample: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the linf ball, and whether their predictions are wrong, bool (B,). Random
    numbers are a pure function of `seed`, uint32 (2,), and the samples' numbers, int32 (B,). The
    start has vertical stripes: the radius is added to or subtracted from a column of a channel."""
    shape = ball.images.shape[1:]
    height, width, channels = shape
    sides = jnp.asarray(list_sides(steps, height, width))
    stripes = draw_uniforms(seed, 0, sample, STRIPES_DRAW, width * channels)
    signs = jnp.where(stripes < 0.5, -1.0, 1.0).reshape(-1, 1, width, channels)
    start = ball.project(ball.images + ball.radius * jnp.broadcast_to(signs, (len(signs), *shape)))
    rows = jnp.arange(height)[:, None, None]
    columns = jnp.arange(width)[:, None]

    def paint(step: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        points, margins = carry
        side = sides[step]
        draws = draw_uniforms(seed, step, sample, SQUARES_DRAW, 2 + channels)
        num_places = jnp.array([height, width]) - side + 1
        top_left = jnp.floor(draws[:, :2] * num_places).astype(jnp.int32)
        # Offsets of the pixels from the top left corner of the square.
        down = rows - top_left[:, 0, None, None, None]
        right = columns - top_left[:, 1, None, None, None]
        is_inside = (down >= 0) & (down < side) & (right >= 0) & (right < side)
        sign = jnp.where(draws[:, 2:] < 0.5, -1.0, 1.0)[:, None, None, :]
        painted = ball.project(jnp.where(is_inside, ball.images + ball.radius * sign, points))
        new_margins = compute_margin(attacked.predict(painted), attacked.labels)
        # A prediction with a margin above 0 is wrong, and its image doesn't change any more.
        is_better = (new_margins > margins) & (margins <= 0)
        points = jnp.where(is_better[:, None, None, None], painted, points)
        return points, jnp.where(is_better, new_margins, margins)

    margins = compute_margin(attacked.predict(start), attacked.labels)
    end, _ = jax.lax.fori_loop(0, steps, paint, (start, margins))
    return end, attacked.is_fooled(end)
