"""What a training step reads and writes: the state, and the record of one step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import register_dataclass

Array = jax.Array


@register_dataclass
@dataclass(frozen=True)
class OverflowCounts:
    """What a loss scale that skips overflows counts, int32 scalars."""

    good_steps: Array
    """Steps since the last overflow, or since the scale was last changed."""
    bad_steps: Array
    """Overflows one after the other, up to now."""
    skipped_steps: Array
    """Overflows since the run began."""


@register_dataclass
@dataclass(frozen=True)
class BadStepCounts:
    """What a policy that goes on behind bad steps counts, int32 scalars."""

    in_a_row: Array
    """Bad steps one after the other, up to now."""
    left_out: Array
    """Steps since the run began whose updates were left out, or undone by going back."""


@register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes; what a checkpoint holds.

    `step` (int32 scalar) counts steps, those without an update among them. Random draws are keyed
    by (seed, step), so the state of the random generator is the seed and this counter. `loss_scale`
    is a float32 scalar. What a recipe does not ask for is None.
    """

    step: Array
    params: Any
    batch_stats: Any
    opt_state: Any
    loss_scale: Array
    overflows: OverflowCounts | None = None
    average: Any = None
    """The moving average of the parameters that are trained."""
    bad_steps: BadStepCounts | None = None


class Record(NamedTuple):
    """What is kept of every step, float32 scalars; the columns of the telemetry buffer.

    `skipped` is 1 where the update was left out, for an overflow or by `on_nan: skip`, else 0.
    """

    loss: Array
    learning_rate: Array
    grad_norm: Array
    loss_scale: Array
    skipped: Array | float = 0.0

    @property
    def should_continue(self) -> Array:
        """Whether training goes on behind this step, bool (): it was finite, or skipped."""
        finite = jnp.isfinite(self.loss) & jnp.isfinite(self.grad_norm)
        return finite | (jnp.asarray(self.skipped) > 0)
