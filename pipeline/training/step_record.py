"""The record of a step: names and values of its metrics.

The columns of the telemetry, the keys of metrics.jsonl, and the tags of TensorBoard and trackers
are the fields of `Record`, in this order.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from pipeline.training.state import Gradients, TrainState
from pipeline.training.telemetry import StepOutcome


class Record(NamedTuple):
    """Record of one step, float32 scalars; the columns of the telemetry buffer.

    `skipped` is 1 if the update was skipped, for an overflow or by `on_nan: skip`, else 0.
    """

    loss: Array
    learning_rate: Array
    grad_norm: Array
    loss_scale: Array
    skipped: Array | float = 0.0

    @property
    def should_continue(self) -> Array:
        """Whether training continues after this step, bool ()."""
        outcome = StepOutcome.from_columns(jnp, self.loss, self.grad_norm, self.skipped)
        return outcome.should_continue


FLAGS = frozenset({"skipped"})
"""Columns that are 0 or 1. Monitors write them only for the steps that have 1."""


def record_step(
    state: TrainState,
    gradients: Gradients,
    learning_rate: Array,
    grad_norm: Array,
    outcome: StepOutcome,
) -> Record:
    """Return the record of a step.

    `state` is the state before the step, `gradients` are of the scaled loss, and `grad_norm` is the
    norm of the unscaled gradients.
    """
    return Record(
        loss=gradients.loss,
        learning_rate=learning_rate,
        grad_norm=grad_norm,
        loss_scale=state.loss_scale,
        skipped=outcome.skipped.astype(jnp.float32),
    )
