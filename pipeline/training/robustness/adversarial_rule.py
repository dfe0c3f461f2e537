"""Adversarial training: the attack of a training step on its images, whose radius is in units of
the raw image's pixels, 0 to 1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import BatchOp, MapOp, WrappedOp
from pipeline.data.ops.color import RandomColorAdjust
from pipeline.data.ops.geometry import Cutout
from pipeline.data.ops.image import GeometricOp
from pipeline.data.ops.policies import Policy
from pipeline.data.ops.values import Hwc2Chw, Normalize, Rescale, TypeCast
from pipeline.training.forward_pass import ForwardPass, Outputs
from pipeline.training.losses import compute_losses
from pipeline.training.robustness.attack_specs import AdversarialSpec
from pipeline.training.robustness.attacks import Ball, Objective, draw_uniforms, maximize
from pipeline.training.state import MappedBatch
from pipeline.training.step_feature import StepFeature

RANGE_KEEPING = (BatchOp, GeometricOp, RandomColorAdjust, Cutout, Policy, Hwc2Chw, TypeCast)
"""Ops that change images but not the range of their values."""


@dataclass(frozen=True)
class PixelScale:
    """The map from pixels to inputs of a network, pixel * factor + shift. Factor and shift have one
    value, or one for each channel."""

    factor: tuple[float, ...]
    shift: tuple[float, ...]

    def to_inputs(self, pixels: Any) -> Any:
        """Return the inputs of pixels (B, H, W, C)."""
        return pixels * np.array(self.factor, np.float32) + np.array(self.shift, np.float32)

    def to_pixels(self, inputs: Any) -> Any:
        """Return the pixels, 0 to 1, of inputs (B, H, W, C)."""
        factor = np.array(self.factor, np.float32)
        shift = np.array(self.shift, np.float32)
        return ((inputs - shift) / factor).clip(0, 1)


def find_white(image: ColumnSpec, brightest: int) -> float:
    """Return the value of a white pixel of raw images: `brightest` if values are integers, else
    1."""
    return float(brightest) if np.issubdtype(np.dtype(image.dtype), np.integer) else 1.0


def find_pixel_scale(ops: Sequence[MapOp], white: float) -> PixelScale:
    """Return the scale after map ops on raw images, whose white pixels have the value `white`.
    Raises ValueError for an op that changes values in another way than rescale and normalize, and
    for a factor of 0. Its text begins with the op's position and name."""
    factor = np.array([white])
    shift = np.zeros(1)
    for position, entry in enumerate(ops):
        op = entry.op if isinstance(entry, WrappedOp) else entry
        if "image" not in op.columns:
            continue
        if isinstance(op, Rescale):
            factor = factor * op.factor
            shift = shift * op.factor + op.shift
        elif isinstance(op, Normalize):
            factor = factor / np.array(op.std)
            shift = (shift - np.array(op.mean)) / np.array(op.std)
        elif not isinstance(op, RANGE_KEEPING):
            raise ValueError(
                f"ops.{position} ({op.name}): changes values so that they have no radius in "
                "pixels; must be rescale or normalize"
            )
        if not factor.all():
            raise ValueError(f"ops.{position} ({op.name}): must not have factor 0")
    return PixelScale(tuple(factor.tolist()), tuple(shift.tolist()))


ATTACKED = "attacked"
"""Name of the attacked images among the extras of a batch."""
TRAINING_DRAW = 0
"""Number of the draws of a training step."""


@dataclass(frozen=True)
class AdversarialRule(StepFeature):
    """The attack of a training step, on pixels of the raw image.

    The loss is computed of the attacked images. With trades it is the plain images' loss, plus beta
    times the divergence between the outputs for plain and attacked images.
    """

    name: ClassVar[str] = "adversarial"
    spec: AdversarialSpec
    scale: PixelScale

    @property
    def predicts(self) -> bool:  # type: ignore[override]
        return True

    @property
    def beta(self) -> float | None:
        """The weight of the divergence in trades; None for other attacks."""
        return self.spec.beta if self.spec.attack == "trades" else None

    def draw(self, batch: Batch, inputs: Array) -> Array:  # type: ignore[override]
        """Return uniform numbers for images (B, H, W, C): float32 (B, H * W * C + 1).

        The first H * W * C are for the random start, and the last decides whether the image is
        attacked. They depend only on (seed, epoch, sample), not on sinks, shards and microbatches.
        """
        count = prod(inputs.shape[1:]) + 1
        return draw_uniforms(batch.seed, batch.epoch, batch.sample, TRAINING_DRAW, count)

    def change_inputs(self, forward: ForwardPass) -> MappedBatch:
        batch = forward.batch
        attacked = self._attack_batch(forward)
        if self.beta is None:
            return batch._replace(inputs=attacked)
        return batch._replace(extras={**batch.extras, ATTACKED: attacked})

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        if self.beta is None:
            return outputs
        attacked = forward.batch.extras[ATTACKED]
        attacked_logits, collections = forward.apply(trained, outputs.collections, attacked)
        divergence = compute_divergence(outputs.logits, attacked_logits)
        losses = outputs.losses + self.beta * divergence
        return outputs._replace(losses=losses, collections=collections)

    def _attack_batch(self, forward: ForwardPass) -> Array:
        """Return the attacked images of a microbatch. The attack applies the network as an
        evaluation does, so the attack on a sample doesn't depend on other samples."""
        batch = forward.batch
        images = batch.inputs
        assert not isinstance(images, dict), "attacks need images"
        plain_logits = forward.predict(images) if self.beta is not None else None

        def compute_objective(images: Array) -> Array:
            logits = forward.predict(images)
            if plain_logits is not None:
                return compute_divergence(plain_logits, logits)
            return compute_losses(forward.config, logits, batch.labels)

        draws = batch.extras.get(self.name)
        return self.attack(compute_objective, images, draws, forward.state.step)

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
