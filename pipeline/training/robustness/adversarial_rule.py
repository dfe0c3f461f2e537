"""The attack of a training step on its images."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.data.batch import Batch
from pipeline.training.robustness.attack_specs import AdversarialSpec
from pipeline.training.robustness.ball import Ball, Objective, draw_uniforms, maximize
from pipeline.training.robustness.pixel_scale import PixelScale

TRAINING_DRAW = 0
"""Number of the draws of a training step."""


@dataclass(frozen=True)
class AdversarialRule:
    """The attack of a training step, on pixels of the raw image."""

    spec: AdversarialSpec
    scale: PixelScale

    @property
    def beta(self) -> float | None:
        """The weight of the divergence in trades; None for other attacks."""
        return self.spec.beta if self.spec.attack == "trades" else None

    def draw(self, batch: Batch, shape: tuple[int, ...]) -> Array:
        """Return uniform numbers for images of `shape`, (B, H, W, C): float32 (B, H * W * C + 1).

        The first H * W * C are for the random start, and the last decides whether the image is
        attacked. They depend only on (seed, epoch, sample), not on sinks, shards and microbatches.
        """
        count = prod(shape[1:]) + 1
        return draw_uniforms(batch.seed, batch.epoch, batch.sample, TRAINING_DRAW, count)

    def attack(
        self, objective: Objective, images: Array, draws: Array | None, step: Array
    ) -> Array:
        """Return attacked images. Images are inputs of the network, (B, H, W, C) float32.
        `objective` takes inputs of the network. Without `draws` the attack starts at the images,
        and attacks all of them. `step` is the number of steps before this one, for the warmup."""
        spec = self.spec
        growth = jnp.float32(1.0)
        if spec.warmup_steps:
            growth = jnp.minimum(1.0, (step + 1).astype(jnp.float32) / spec.warmup_steps)
        ball = Ball(spec.norm, spec.radius * growth, self.scale.to_pixels(images))
        start = ball.images
        if draws is not None and spec.start == "random":
            start = ball.draw(draws[:, :-1].reshape(images.shape))
        end = maximize(
            lambda pixels: objective(self.scale.to_inputs(pixels)),
            ball,
            start,
            spec.num_steps,
            spec.step_size * growth,
        )
        attacked = self.scale.to_inputs(end)
        if draws is not None and spec.share < 1:
            is_attacked = draws[:, -1] < spec.share
            attacked = jnp.where(is_attacked[:, None, None, None], attacked, images)
        return jax.lax.stop_gradient(attacked)


def compute_divergence(plain_logits: Array, attacked_logits: Array) -> Array:
    """Return the Kullback-Leibler divergence of attacked from plain predictions, float32 (B,). It
    is the sum over classes of p log(p / q), with the probabilities p of the plain image and q of
    the attacked one. Takes logits (B, C)."""
    log_p = jax.nn.log_softmax(plain_logits.astype(jnp.float32))
    log_q = jax.nn.log_softmax(attacked_logits.astype(jnp.float32))
    return (jnp.exp(log_p) * (log_p - log_q)).sum(axis=-1)
