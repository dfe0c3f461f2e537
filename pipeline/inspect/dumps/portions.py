"""Portions of a batch: the inputs of each pass through the network in a training step.

A step passes through the network once, or once for each shard and each microbatch. The map ops, the
slices and the random keys are the same as in the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.tree_util import register_dataclass

from pipeline.core.errors import RecipeError
from pipeline.data.batch import Batch
from pipeline.data.padding.buckets import SIZE
from pipeline.data.padding.pad_samples import crop_to
from pipeline.data.transform import choose_variant, select_variants
from pipeline.training.features.accumulation import count_microbatches
from pipeline.training.losses import count_valid_labels, divides_by_labels
from pipeline.training.parallel.microbatches import stack_microbatches
from pipeline.training.step import make_dropout_key, map_batch, mask_batch
from pipeline.training.step_config import StepConfig


@register_dataclass
@dataclass(frozen=True)
class Portion:
    """The inputs of one pass through network and loss; `dropout` is a random key."""

    inputs: Any
    """Inputs of the network after the map ops: an array (B, ...), or several by name."""
    labels: Array
    mask: Array
    """bool (B,): true for valid samples, false for padding."""
    dropout: Array
    divisor: Array
    """float32 (): divisor of a mean over the whole batch."""


BatchPortions = tuple[tuple[Portion, ...], ...]
"""The microbatches of every shard, in the order in which a step adds their gradients.

Batch norm continues from the running statistics of the previous microbatch. Every shard starts from
the state's statistics, and the statistics of the shards are averaged.
"""


def split_batch(config: StepConfig, batch: Batch, step: int) -> BatchPortions:
    """Return the portions of the batch after `step` steps; `config` is of that step's phase.

    Raises RecipeError for adversarial training.
    """
    if config.list_acting("change_inputs"):
        raise RecipeError(
            "train.adversarial: must be null for dumps and comparisons, which read samples without "
            "attack"
        )
    key = make_dropout_key(batch, step)
    keys = [key]
    if config.shards is not None:
        keys = [jax.random.fold_in(key, number) for number in range(config.shards.count)]
    size = batch.sample.shape[0] // len(keys)  # of a shard
    shards = []
    for number, dropout_key in enumerate(keys):
        part = _slice_batch(batch, number * size, size)
        inputs, labels = _map_batch(config, part, step)
        shards.append(mask_batch(inputs, labels, part.count, dropout_key))
    divisor = jnp.float32(batch.count)
    if divides_by_labels(config):
        weights: list[Any] = [count_valid_labels(config, s.labels, s.mask) for s in shards]
        divisor = jnp.maximum(sum(weights), 1.0)
    return tuple(
        _split_microbatches(
            config, Portion(shard.inputs, shard.labels, shard.mask, shard.dropout_key, divisor)
        )
        for shard in shards
    )


def _map_batch(config: StepConfig, batch: Batch, step: int) -> tuple[Any, Array]:
    """Crop a batch to its bucket, and return inputs and labels after the ops drawn for it."""
    if config.padding.buckets:
        largest = np.asarray(batch.columns[SIZE]).max(axis=0)
        fits = (largest <= np.array(config.padding.buckets)).all(axis=-1)
        bucket = config.padding.buckets[int(np.argmax(fits))]
        batch = crop_to(jnp, bucket, batch, config.padding.columns, is_random=True)
    number = choose_variant(jnp, config.train_ops, batch.seed, batch.epoch, jnp.int32(step))
    ops = select_variants(config.train_ops, int(number))
    return jax.jit(partial(map_batch, config, ops))(batch)


def _slice_batch(batch: Batch, first: int, size: int) -> Batch:
    return replace(
        batch,
        columns={name: column[first : first + size] for name, column in batch.columns.items()},
        sample=batch.sample[first : first + size],
        count=jnp.clip(batch.count - first, 0, size),
    )


def _split_microbatches(config: StepConfig, portion: Portion) -> tuple[Portion, ...]:
    samples = portion.inputs, portion.labels, portion.mask
    num_microbatches = count_microbatches(config.features)
    (inputs, labels, mask), keys = stack_microbatches(samples, portion.dropout, num_microbatches)
    return tuple(
        Portion(
            jax.tree.map(lambda array: array[number], inputs),  # noqa: B023
            labels[number],
            mask[number],
            keys[number],
            portion.divisor,
        )
        for number in range(num_microbatches)
    )
