"""The images that an attack may return: pixels from 0 to 1, within a radius of the image."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.data.random import uniforms
from pipeline.training.robustness.attack_specs import Norm

Objective = Callable[[Array], Array]
"""(pixels (B, H, W, C)) -> what the attack maximizes, float32 (B,)."""
TINY = 1e-12
"""Lower bound of divisors that could be 0."""
ATTACK_OP = (1 << 30) + 2
"""First op number in the keys of an attack's draws. No map op has such a number."""


@dataclass(frozen=True)
class Ball:
    """The images within `radius` of `images`, pixels (B, H, W, C) from 0 to 1, in a norm."""

    norm: Norm
    radius: Any
    """A float, or an array, float32 ()."""
    images: Array

    def project(self, points: Array) -> Array:
        """Return images of the ball near `points`; with linf, the nearest ones."""
        if self.norm == "linf":
            changes = jnp.clip(points - self.images, -self.radius, self.radius)
        else:
            changes = jnp.clip(points, 0.0, 1.0) - self.images
            length = compute_l2(changes)
            changes = changes * jnp.minimum(1.0, self.radius / jnp.maximum(length, TINY))
        return jnp.clip(self.images + changes, 0.0, 1.0)

    def step(self, points: Array, gradients: Array, size: Any) -> Array:
        """Return the ends of steps of length `size`, in the norm, along gradients."""
        if self.norm == "linf":
            direction = jnp.sign(gradients)
        else:
            direction = gradients / jnp.maximum(compute_l2(gradients), TINY)
        return self.project(points + size * direction)

    def draw(self, draws: Array) -> Array:
        """Return random images in the ball from uniform numbers (B, H, W, C). With linf, changes
        are uniform before pixels are clipped. With l2, the direction is uniform, and the length is
        the radius: in many dimensions almost all of a ball is near its surface."""
        centred = 2 * draws - 1
        if self.norm == "linf":
            return self.project(self.images + self.radius * centred)
        normals = to_normals(draws)
        return self.project(self.images + self.radius * normals / compute_l2(normals))


def compute_l2(changes: Array) -> Array:
    """Return the L2 norm of each image's changes, (B, 1, 1, 1)."""
    return jnp.sqrt(jnp.square(changes).sum(axis=(1, 2, 3), keepdims=True))


def to_normals(draws: Array) -> Array:
    """Return standard normal numbers from uniform numbers, float32 of the same shape."""
    # The numbers are mapped to values between 0 and 1, whose normals are finite.
    normals: Array = jax.scipy.special.ndtri(draws * (1 - 2.0**-23) + 2.0**-25)
    return normals


def draw_uniforms(seed: Array, turn: Any, sample: Array, op: int, count: int) -> Array:
    """Return uniform numbers of an attack, float32 (B, count), a pure function of (seed, `turn`,
    sample, op). A turn is an epoch, a restart or a step."""
    return uniforms(jnp, seed, jnp.asarray(turn), sample, ATTACK_OP + op, count)  # type: ignore[no-any-return]


def maximize(objective: Objective, ball: Ball, start: Array, steps: int, size: Any) -> Array:
    """Return the images after projected gradient steps of length `size` from `start` (Madry et al.
    2018). The steps of an image depend only on its objective."""
    differentiate = jax.grad(lambda points: objective(points).sum())

    def move(_: Array, points: Array) -> Array:
        return ball.step(points, differentiate(points), size)

    return jax.lax.fori_loop(0, steps, move, start)
