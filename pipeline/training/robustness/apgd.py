"""Auto-PGD: gradient steps with momentum, whose length is halved if the loss grows too slowly.

Croce and Hein 2020, arXiv 2003.01690, algorithm 1, with alpha 0.75 and rho 0.75.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.training.robustness.attack_losses import AttackedNetwork, AttackLoss
from pipeline.training.robustness.ball import Ball

MOMENTUM = 0.75
"""Weight of the gradient step in a change of the image. The previous change has 1 - MOMENTUM."""
PROGRESS = 0.75
"""The step length is halved if at most this share of a window's steps has increased the loss."""


class _Search(NamedTuple):
    """The state of each image's search. Images and gradients are (B, H, W, C), other arrays
    (B,)."""

    points: Array
    """The images after the last step."""
    previous: Array
    """The images before the last step."""
    losses: Array
    gradients: Array
    best: Array
    """The images with the largest loss so far."""
    best_losses: Array
    best_gradients: Array
    fooling: Array
    """The last image with a wrong prediction; the start if there was none."""
    fooled: Array
    """Whether there was a wrong prediction, bool."""
    size: Array
    """Length of a step."""
    increases: Array
    """Steps since the last checkpoint that have increased the loss."""
    checked_losses: Array
    """The best loss at the last checkpoint."""
    was_halved: Array
    """Whether the last checkpoint has halved the length."""


def list_windows(steps: int) -> np.ndarray:
    """Return for each step the length of the window that ends with it, int32 (steps,); 0 if none
    does. A window ends at a checkpoint of the paper. The first window has 22 % of the steps. Each
    later one is shorter by 3 % of the steps, but has at least 6 %."""
    lengths = np.zeros(steps, np.int32)
    decrease = max(int(0.03 * steps), 1)
    least_length = max(int(0.06 * steps), 1)
    length = max(int(0.22 * steps), 1)
    end = length
    while end <= steps:
        lengths[end - 1] = length
        length = max(length - decrease, least_length)
        end += length
    return lengths


def search(
    attacked: AttackedNetwork, loss: AttackLoss, ball: Ball, start: Array, steps: int
) -> tuple[Array, Array]:
    """Return images of the ball, and whether their predictions are wrong, bool (B,). If the search
    finds no wrong prediction, the image is the one with the largest loss."""
    losses, fooled, gradients = attacked.differentiate(loss, start)
    size = jnp.full(losses.shape, 2.0 * ball.radius, jnp.float32)
    first = _Search(
        points=start,
        previous=start,
        losses=losses,
        gradients=gradients,
        best=start,
        best_losses=losses,
        best_gradients=gradients,
        fooling=start,
        fooled=fooled,
        size=size,
        increases=jnp.zeros(losses.shape, jnp.int32),
        checked_losses=losses,
        was_halved=jnp.ones(losses.shape, bool),
    )
    windows = jnp.asarray(list_windows(steps))

    def move(number: Array, state: _Search) -> _Search:
        momentum = jnp.where(number > 0, MOMENTUM, 1.0)
        stepped = ball.step(state.points, state.gradients, state.size[:, None, None, None])
        step = stepped - state.points
        change = momentum * step + (1 - momentum) * (state.points - state.previous)
        points = ball.project(state.points + change)
        losses, fooled, gradients = attacked.differentiate(loss, points)
        is_best = losses > state.best_losses
        moved = state._replace(
            points=points,
            previous=state.points,
            losses=losses,
            gradients=gradients,
            best=_choose(is_best, points, state.best),
            best_losses=jnp.where(is_best, losses, state.best_losses),
            best_gradients=_choose(is_best, gradients, state.best_gradients),
            fooling=_choose(fooled, points, state.fooling),
            fooled=state.fooled | fooled,
            increases=state.increases + (losses > state.losses),
        )
        window = windows[number]
        return jax.lax.cond(window > 0, _halve_slow, lambda state, _: state, moved, window)

    end = jax.lax.fori_loop(0, steps, move, first)
    return _choose(end.fooled, end.fooling, end.best), end.fooled


def _halve_slow(state: _Search, window: Array) -> _Search:
    """Halve the step length of searches that are slow or stuck, and continue them from their best
    image. `window` is the number of steps since the last checkpoint."""
    is_slow = state.increases <= PROGRESS * window
    is_stuck = ~state.was_halved & (state.checked_losses >= state.best_losses)
    is_halved = is_slow | is_stuck
    return state._replace(
        points=_choose(is_halved, state.best, state.points),
        gradients=_choose(is_halved, state.best_gradients, state.gradients),
        size=jnp.where(is_halved, state.size / 2, state.size),
        increases=jnp.zeros_like(state.increases),
        checked_losses=state.best_losses,
        was_halved=is_halved,
    )


def _choose(condition: Array, images: Array, others: Array) -> Array:
    return jnp.where(condition[:, None, None, None], images, others)
