"""How the losses of a batch become one number: which samples and labels count, and how much."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array

from pipeline.training.masks import top_share_mask
from pipeline.training.step_parts import StepConfig


def label_mask(parts: StepConfig, labels: Array) -> Array | None:
    """Those that are not left out, bool like the labels (B, ...); None where all count."""
    if parts.ignore_index is None:
        return None
    return labels.astype(jnp.int32) != parts.ignore_index


def sample_losses(parts: StepConfig, logits: Array, labels: Array) -> Array:
    """The loss of every sample, float32 (B,): the mean over its labels that count."""
    where = label_mask(parts, labels)
    return parts.loss(logits, labels) if where is None else parts.loss(logits, labels, where)


def normalizer(parts: StepConfig, labels: Array, real: Array, count: Array | int) -> Array | int:
    """What the mean over a batch divides by: its `count` real samples, or their labels that count.

    With labels left out every label weighs the same, as in PyTorch's `cross_entropy`, however many
    its sample has. Where all are left out it is 1, which makes the loss 0; PyTorch's is NaN then.
    """
    weights = _weights(parts, labels)
    if weights is None:
        return count
    return jnp.maximum(jnp.sum(jnp.where(real, weights, 0.0)), 1.0)


def reduce_losses(
    parts: StepConfig, losses: Array, labels: Array, real: Array, normalizer: Array | int
) -> Array:
    """What the real samples add to the loss, float32 (), from the losses of all, (B,).

    The losses of padding, and of samples without a label that counts, may be anything. Gradients
    are another matter: what is not finite in the network's pass over a sample reaches the weights
    also times 0, so padding repeats a real sample.
    """
    weights = _weights(parts, labels)
    counted = real if weights is None else real & (weights > 0)
    if parts.hardest_share < 1:
        counted = top_share_mask(losses, parts.hardest_share, counted)
        weighed = counted if weights is None else jnp.where(counted, weights, 0.0)
        normalizer = jnp.maximum(jnp.sum(weighed, dtype=jnp.float32), 1.0)
    if weights is not None and parts.reduction == "mean":
        losses = losses * weights
    losses = jnp.where(counted, losses, 0.0)
    return losses.sum() / normalizer if parts.reduction == "mean" else losses.sum()


def _weights(parts: StepConfig, labels: Array) -> Array | None:
    """How many labels of each sample count, float32 (B,); None where all do."""
    where = label_mask(parts, labels)
    if where is None:
        return None
    return jnp.sum(where, axis=tuple(range(1, where.ndim)), dtype=jnp.float32)
