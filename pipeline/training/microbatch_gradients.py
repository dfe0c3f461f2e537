"""Gradients of a batch after its map ops, computed microbatch by microbatch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.modules.layer_capture import grad_observing_layers
from pipeline.training.curvature import LayerSums, sum_layers
from pipeline.training.ledger import Readings, read_samples
from pipeline.training.losses import compute_losses, make_label_mask, reduce_losses
from pipeline.training.parallel.microbatches import stack_microbatches
from pipeline.training.privacy.clip_samples import clip_microbatch
from pipeline.training.robustness.adversarial_rule import compute_divergence
from pipeline.training.state import (
    Gradients,
    MappedBatch,
    StepConfig,
    TrainState,
    merge_params,
    split_params,
)
from pipeline.training.telemetry import count_updates

GRADIENTS_DRAW = 2**31 - 1
"""Number that derives the key of custom gradients from the dropout key. The numbers of microbatches
and shards, which derive keys too, are smaller."""


def compute_gradients(
    config: StepConfig,
    state: TrainState,
    batch: MappedBatch,
    divisor: Array | int,
    scale: Array | float,
) -> Gradients:
    """Return the gradients of `scale` times the loss of the valid samples of a mapped batch.

    A mean divides by `divisor`. The batch is split into `accumulate` microbatches, whose gradients
    are added one after the other. Except for rounding, the sum differs from the gradients of the
    whole batch only by batch norm, which normalizes each microbatch by itself, and by dropout.
    """
    if config.accumulate == 1:
        return _differentiate_microbatch(config, state, state.batch_stats, batch, divisor, scale)
    samples = batch.images, batch.labels, batch.mask, batch.draws
    microbatches, keys = stack_microbatches(samples, batch.dropout_key, config.accumulate)

    def compute(batch_stats: Any, microbatch: tuple[Any, Array]) -> Gradients:
        (images, labels, mask, draws), key = microbatch
        mapped = MappedBatch(images, labels, mask, key, draws)
        return _differentiate_microbatch(config, state, batch_stats, mapped, divisor, scale)

    def add(total: Gradients, microbatch: tuple[Any, Array]) -> tuple[Gradients, Readings | None]:
        added = compute(total.batch_stats, microbatch)
        sums = jax.tree.map(
            jnp.add,
            total._replace(batch_stats=None),
            added._replace(batch_stats=None, readings=None),
        )
        return sums._replace(batch_stats=added.batch_stats), added.readings

    if not isinstance(batch.images, jax.core.Tracer):
        return _add_in_python(compute, state, (microbatches, keys))

    def compute_first() -> Gradients:
        first = jax.tree.map(lambda x: x[0], (microbatches, keys))
        return compute(state.batch_stats, first)

    shapes = jax.eval_shape(compute_first)
    zero: Gradients = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    zero = zero._replace(batch_stats=state.batch_stats, readings=None)
    total, readings = jax.lax.scan(add, zero, (microbatches, keys))
    return total._replace(readings=jax.tree.map(lambda rows: rows.reshape(-1), readings))


def _add_in_python(
    compute: Callable[[Any, Any], Gradients], state: TrainState, stacked: Any
) -> Gradients:
    """Return the sum over stacked microbatches outside of jit, where a scan would be compiled, and
    custom code couldn't read values."""
    total: Gradients | None = None
    readings = []
    for number in range(len(jax.tree.leaves(stacked)[0])):
        microbatch = jax.tree.map(lambda x, number=number: x[number], stacked)
        batch_stats = state.batch_stats if total is None else total.batch_stats
        added = compute(batch_stats, microbatch)
        readings.append(added.readings)
        added = added._replace(readings=None)
        if total is None:
            total = added
        else:
            sums = jax.tree.map(
                jnp.add, total._replace(batch_stats=None), added._replace(batch_stats=None)
            )
            total = sums._replace(batch_stats=added.batch_stats)
    assert total is not None, "a batch has at least one microbatch"
    joined = jax.tree.map(lambda *rows: jnp.concatenate(rows), *readings)
    return total._replace(readings=joined)


def _differentiate_microbatch(
    config: StepConfig,
    state: TrainState,
    batch_stats: Any,
    batch: MappedBatch,
    divisor: Array | int,
    scale: Array | float,
) -> Gradients:
    """Return a microbatch's share of the loss, and the gradients of `scale` times that share. A
    mean divides by `divisor`, the number of samples or labels of the whole batch."""
    if config.privacy is not None:
        return clip_microbatch(config, state, batch, divisor)
    trained, frozen = split_params(state.params, config.frozen)
    # The loss is computed of the attacked images. With beta (TRADES) it is the plain images' loss,
    # plus beta times the divergence between the outputs for plain and attacked images.
    beta = None if config.adversarial is None else config.adversarial.beta
    attacked = _attack_images(config, state, batch_stats, batch)
    if beta is None:
        batch = batch._replace(images=attacked)

    def apply(trained: Any, batch_stats: Any, images: Array) -> tuple[Array, Any]:
        logits, variables = config.network.apply(
            {"params": merge_params(trained, frozen), "batch_stats": batch_stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": batch.dropout_key},
        )
        return logits, variables.get("batch_stats", {})

    def scaled_loss(trained: Any) -> tuple[Array, tuple[Array, Any, Readings | None]]:
        logits, new_stats = apply(trained, batch_stats, batch.images)
        losses = compute_losses(config, logits, batch.labels)
        if beta is not None:
            attacked_logits, new_stats = apply(trained, new_stats, attacked)
            losses = losses + beta * compute_divergence(logits, attacked_logits)
        loss = reduce_losses(config, losses, batch.labels, batch.mask, divisor)
        readings = None
        if config.ledger_samples is not None:
            where = make_label_mask(config, batch.labels)
            valid = batch.mask if where is None else batch.mask & where
            readings = read_samples(logits, batch.labels, valid)
        return loss.minimised * scale, (loss.reported, new_stats, readings)

    layers: dict[str, LayerSums] = {}
    backward = jax.grad(config.apply_lowerings(scaled_loss), has_aux=True)
    if config.curvature is not None:
        values, auxiliary, captures = grad_observing_layers(
            scaled_loss, trained, config.apply_lowerings
        )
        due = config.curvature.is_due(count_updates(state))
        layers = sum_layers(config.curvature, captures, batch.mask, due)
    elif config.gradients is not None:
        key = jax.random.fold_in(batch.dropout_key, GRADIENTS_DRAW)
        values, auxiliary = config.gradients(backward, trained, key)
    else:
        values, auxiliary = backward(trained)
    loss, new_stats, readings = auxiliary
    return Gradients(values, loss, new_stats, layers, readings=readings)


def _attack_images(
    config: StepConfig, state: TrainState, batch_stats: Any, batch: MappedBatch
) -> Array:
    """Return the images of a microbatch; in adversarial training, attacked images. The attack
    applies the network as an evaluation does: without dropout, and with the running statistics of
    batch norm. So the attack on a sample doesn't depend on other samples."""
    if config.adversarial is None:
        return batch.images
    variables = {"params": state.params, "batch_stats": batch_stats}

    def apply(images: Array) -> Array:
        logits: Any = config.network.apply(variables, images, train=False)
        return logits

    apply = config.apply_lowerings(apply)
    plain_logits = apply(batch.images) if config.adversarial.beta is not None else None

    def compute_objective(images: Array) -> Array:
        logits = apply(images)
        if plain_logits is not None:
            return compute_divergence(plain_logits, logits)
        return compute_losses(config, logits, batch.labels)

    return config.adversarial.attack(compute_objective, batch.images, batch.draws, state.step)
