"""The loss of a recipe's step, to be planned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from pipeline.backends.planner.traced_loss import LossToPlan
from pipeline.training.losses import normalizer, reduce_losses, sample_losses
from pipeline.training.state import StepConfig, TrainState


def loss_of_step(
    name: str,
    config: StepConfig,
    state: TrainState,
    batch: tuple[Any, Any],
    *,
    sync_batch_norm: bool = False,
) -> LossToPlan:
    """Make the loss of a step of its configuration, and of the shapes of state and global batch.

    `batch` are images NHWC float32 and labels as the map ops leave them. Frozen parameters count as
    trained ones, and microbatches as one batch.
    """

    def loss(params: Any, batch: Any) -> jax.Array:
        images, labels = batch
        count = images.shape[0]
        mask = jnp.ones(count, bool)
        stats = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.batch_stats)
        logits, _ = config.network.apply(
            {"params": params, "batch_stats": stats},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(0)},
        )
        losses = sample_losses(config, logits, labels)
        divisor = normalizer(config, labels, mask, count)
        return reduce_losses(config, losses, labels, mask, divisor).minimised

    leaves = jax.tree.leaves(state.opt_state)
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)
    return LossToPlan(name, loss, state.params, batch, state_bytes, sync_batch_norm)
