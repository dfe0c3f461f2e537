"""Gradients of the scaled loss of a batch, and what else the backward pass gives."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.modules.layer_capture import Observations, grad_observing_layers
from pipeline.training.loss_reduction import normalizer, reduce_losses, sample_losses
from pipeline.training.parameters import merge, split
from pipeline.training.state import TrainState
from pipeline.training.step_parts import StepConfig


class Gradients(NamedTuple):
    """What a step knows of its batch before it updates anything."""

    values: Any
    """By trained parameter, float32: of the loss times the scale, until that is taken out."""
    loss: Array
    """float32 ()."""
    batch_stats: Any
    layers: Observations
    """What layers saw, where the optimizer asks for it, else empty."""


class Mapped(NamedTuple):
    """A batch, or a piece of one, behind its map ops."""

    images: Array
    """(B, H, W, C) float32."""
    labels: Array
    """(B, ...) int or (B, ..., C) float."""
    real: Array
    """bool (B,): what is no padding."""
    dropout: Array
    """A key."""


def compute_gradients(
    parts: StepConfig,
    state: TrainState,
    images: Array,
    labels: Array,
    count: Array | int,
    dropout: Array,
    scale: Array | float,
) -> Gradients:
    """Gradients of `scale` times the loss of the first `count` samples of a mapped batch.

    Takes images (B, H, W, C) float32, labels (B, ...) int or (B, ..., C) float, and a key for
    dropout. With `accumulate` pieces the sum over these, one after the other, of what is the same
    sum at once: but for batch norm, which sees a piece at a time, and for what dropout draws.
    """
    real = jnp.arange(images.shape[0]) < count
    batch = Mapped(images, labels, real, dropout)
    whole = normalizer(parts, labels, real, count)
    if parts.accumulate == 1:
        return _of_piece(parts, state, state.batch_stats, batch, whole, scale)
    keys = jax.vmap(lambda i: jax.random.fold_in(dropout, i))(jnp.arange(parts.accumulate))
    pieces = jax.tree.map(
        lambda x: x.reshape(parts.accumulate, -1, *x.shape[1:]), (images, labels, real)
    )

    def add(total: Gradients, piece: tuple[Any, Array]) -> tuple[Gradients, None]:
        (images, labels, real), key = piece
        mapped = Mapped(images, labels, real, key)
        found = _of_piece(parts, state, total.batch_stats, mapped, whole, scale)
        values = jax.tree.map(jnp.add, total.values, found.values)
        return Gradients(values, total.loss + found.loss, found.batch_stats, {}), None

    trained, _ = split(state.params, parts.frozen)
    zero = Gradients(
        jax.tree.map(jnp.zeros_like, trained), jnp.zeros((), jnp.float32), state.batch_stats, {}
    )
    return jax.lax.scan(add, zero, (pieces, keys))[0]


def _of_piece(
    parts: StepConfig,
    state: TrainState,
    batch_stats: Any,
    batch: Mapped,
    whole: Array | int,
    scale: Array | float,
) -> Gradients:
    """What the real samples of a piece add to the loss, and its gradients; a mean is over `whole`
    samples or labels."""
    trained, frozen = split(state.params, parts.frozen)

    def scaled_loss(trained: Any) -> tuple[Array, tuple[Array, Any]]:
        logits, changed = parts.network.apply(
            {"params": merge(trained, frozen), "batch_stats": batch_stats},
            batch.images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": batch.dropout},
        )
        losses = sample_losses(parts, logits, batch.labels)
        loss = reduce_losses(parts, losses, batch.labels, batch.real, whole)
        return loss * scale, (loss, changed.get("batch_stats", {}))

    if parts.observe_layers:
        values, (loss, batch_stats), layers = grad_observing_layers(scaled_loss)(trained)
        return Gradients(values, loss, batch_stats, layers)
    values, (loss, batch_stats) = jax.grad(scaled_loss, has_aux=True)(trained)
    return Gradients(values, loss, batch_stats, {})
