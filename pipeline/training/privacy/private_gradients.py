"""The gradients of a private step, before noise is added."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import Array

from pipeline.models.modules.layer_capture import grad_observing_layers
from pipeline.training.losses import compute_losses
from pipeline.training.privacy.add_noise import PrivacyState
from pipeline.training.privacy.clip_samples import sum_clipped
from pipeline.training.state import (
    Gradients,
    MappedBatch,
    StepConfig,
    TrainState,
    merge_params,
    split_params,
)


def clip_microbatch(
    config: StepConfig, state: TrainState, batch: MappedBatch, divisor: Array | int
) -> Gradients:
    """Return the clipped sum of the gradients of a microbatch's samples, without noise, and the
    microbatch's share of the mean loss. Losses that aren't finite are left out."""
    trained, frozen = split_params(state.params, config.frozen)

    def sum_losses(trained: Any) -> tuple[Array, Array]:
        logits: Any = config.network.apply(
            {"params": merge_params(trained, frozen)},
            batch.images,
            train=True,
            rngs={"dropout": batch.dropout_key},
        )
        losses = jnp.where(batch.mask, compute_losses(config, logits, batch.labels), 0.0)
        return losses.sum(), losses

    observed = grad_observing_layers(sum_losses, config.apply_lowerings, all_modules=True)
    _, losses, captures = observed(trained)
    clipped = sum_clipped(captures, trained, batch.mask, get_privacy(state).clip)
    total = jnp.where(jnp.isfinite(losses), losses, 0.0).sum()
    loss = total / jnp.maximum(divisor, 1)
    return Gradients(clipped.values, loss, state.batch_stats, {}, clipped.within)


def get_privacy(state: TrainState) -> PrivacyState:
    """Return the secret and the clip of a private run's state."""
    assert state.privacy is not None, "the state of a private run has its secret"
    return state.privacy
