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
        """Return uniform numbers for a batch of images (B, H, W, C), float32 (B, H * W * C + 1).

        One for each value of the start; the last decides whether the image is attacked. They are a
        pure function of (seed, epoch, sample), whatever the sinks, shards and microbatches.
        """
        count = prod(shape[1:]) + 1
        return draw_uniforms(batch.seed, batch.epoch, batch.sample, TRAINING_DRAW, count)

    def attack(
        self, objective: Objective, images: Array, draws: Array | None, step: Array
    ) -> Array:
        """Return attacked images. Images are inputs of the network, (B, H, W, C) float32.

        `objective` takes inputs of the network. Without `draws` the attack starts at the images.
        """
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


def compute_divergence(clean: Array, attacked: Array) -> Array:
    """Return the Kullback-Leibler divergence of attacked from clean predictions, float32 (B,).

    It is the sum of p log(p / q), with p of the clean image. Takes logits (B, C).
    """
    clean = jax.nn.log_softmax(clean.astype(jnp.float32))
    attacked = jax.nn.log_softmax(attacked.astype(jnp.float32))
    return (jnp.exp(clean) * (clean - attacked)).sum(axis=-1)
