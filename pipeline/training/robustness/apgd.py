"""Auto-PGD: gradient steps with momentum, whose length depends on their progress.

Croce and Hein 2020, arXiv 2003.01690, algorithm 1, with alpha 0.75 and rho 0.75.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.training.robustness.attack_losses import Attacked, AttackLoss
from pipeline.training.robustness.ball import Ball

MOMENTUM = 0.75
"""Share of the new step; the rest is of the last change."""
PROGRESS = 0.75
"""Share of the steps between two checkpoints that must increase the loss."""


class _Search(NamedTuple):
    """The state of each image's search; arrays of images are (B, H, W, C), others (B,)."""

    points: Array
    previous: Array
    losses: Array
    gradients: Array
    best: Array
    best_losses: Array
    best_gradients: Array
    fooling: Array
    """The last image with a wrong prediction."""
    fooled: Array
    size: Array
    """Length of a step."""
    increases: Array
    """Steps since the last checkpoint that have increased the loss."""
    checked_losses: Array
    """The best loss at the last checkpoint."""
    was_halved: Array
    """Whether the last checkpoint has halved the length."""


def list_windows(steps: int) -> np.ndarray:
    """Return the number of steps since the last checkpoint at each checkpoint, int32 (steps,).

    Steps without a checkpoint have 0. The first window is 22 % of the steps, each next one is 3 %
    of them shorter, down to 6 %.
    """
    windows = np.zeros(steps, np.int32)
    window = max(int(0.22 * steps), 1)
    end = window
    while end <= steps:
        windows[end - 1] = window
        window = max(window - max(int(0.03 * steps), 1), max(int(0.06 * steps), 1))
        end += window
    return windows


def search(
    attacked: Attacked, loss: AttackLoss, ball: Ball, start: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the ball, and whether their predictions are wrong, bool (B,).

    An image without a wrong prediction is the one with the largest loss.
    """
    losses, fooled, gradients = attacked.differentiate(loss, start)
    size = jnp.full(losses.shape, 2.0 * ball.radius, jnp.float32)
    none = jnp.zeros(losses.shape, jnp.int32)
    first = _Search(
        *(start, start, losses, gradients, start, losses, gradients, start, fooled),
        *(size, none, losses, jnp.ones(losses.shape, bool)),
    )
    windows = jnp.asarray(list_windows(steps))

    def move(number: Array, at: _Search) -> _Search:
        momentum = jnp.where(number > 0, MOMENTUM, 1.0)
        stepped = ball.step(at.points, at.gradients, at.size[:, None, None, None])
        change = momentum * (stepped - at.points) + (1 - momentum) * (at.points - at.previous)
        points = ball.project(at.points + change)
        losses, fooled, gradients = attacked.differentiate(loss, points)
        is_best = losses > at.best_losses
        moved = at._replace(
            points=points,
            previous=at.points,
            losses=losses,
            gradients=gradients,
            best=_choose(is_best, points, at.best),
            best_losses=jnp.where(is_best, losses, at.best_losses),
            best_gradients=_choose(is_best, gradients, at.best_gradients),
            fooling=_choose(fooled, points, at.fooling),
            fooled=at.fooled | fooled,
            increases=at.increases + (losses > at.losses),
        )
        window = windows[number]
        return jax.lax.cond(window > 0, _halve_slow, lambda at, _: at, moved, window)

    end = jax.lax.fori_loop(0, steps, move, first)
    return _choose(end.fooled, end.fooling, end.best), end.fooled


def _halve_slow(at: _Search, window: Array) -> _Search:
    """Halve the length of slow searches, which go on from their best image."""
    is_slow = at.increases <= PROGRESS * window
    is_stuck = ~at.was_halved & (at.checked_losses >= at.best_losses)
    halves = is_slow | is_stuck
    return at._replace(
        points=_choose(halves, at.best, at.points),
        gradients=_choose(halves, at.best_gradients, at.gradients),
        size=jnp.where(halves, at.size / 2, at.size),
        increases=jnp.zeros_like(at.increases),
        checked_losses=at.best_losses,
        was_halved=halves,
    )


def _choose(condition: Array, images: Array, others: Array) -> Array:
    return jnp.where(condition[:, None, None, None], images, others)
