"""How a step changes the state: the update, an overflow that skips it, or a bad step that is left
out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.modules.layer_capture import Captured
from pipeline.training.bad_steps import BadStepPolicy
from pipeline.training.gradients import Gradients
from pipeline.training.loss_scales import LossScaling
from pipeline.training.parameters import apply_directions, merge, split, update_ema
from pipeline.training.state import BadStepCounts, OverflowCounts, Record, TrainState
from pipeline.training.step_parts import StepConfig

MAX_CONSECUTIVE_OVERFLOWS = 1000
"""So many overflows in a row end a run: DynamicLossScaleManager's `bad_step_max`."""


def apply_update(
    parts: StepConfig,
    state: TrainState,
    gradients: Gradients,
    count: Array | int,
    unscale: Array | float,
    rate: Array | float,
) -> TrainState:
    """The state after an update: p <- p - rate * direction, for what is trained.

    The gradients are those of the loss itself, over the first `count` samples; what layers saw of
    it is still to be multiplied by `unscale`, the inverse of the loss scale.
    """
    observed = _observed(parts, gradients, count, unscale)
    trained, frozen = split(state.params, parts.frozen)
    directions, opt_state = parts.optimizer.update(
        gradients.values, state.opt_state, trained, **observed
    )
    moved = apply_directions(trained, directions, rate, parts.rate_rules)
    average = state.average
    if parts.average is not None:
        average = update_ema(average, moved, parts.average, updates_so_far(state))
    return replace(
        state,
        step=state.step + 1,
        params=merge(moved, frozen),
        batch_stats=gradients.batch_stats,
        opt_state=opt_state,
        average=average,
    )


def _observed(
    parts: StepConfig, gradients: Gradients, count: Array | int, unscale: Array | float
) -> dict[str, Captured]:
    """What the optimizer is told besides the gradients, by the name of the argument."""
    if not parts.observe_layers:
        return {}
    scale = unscale * count if parts.reduction == "mean" else unscale
    return {"observed": Captured(gradients.layers, count, scale)}


def apply_if_finite(
    finite: Array, advanced: Callable[[TrainState], TrainState], state: TrainState
) -> TrainState:
    """The state advanced, or as it was.

    The CPU branches, which spares it the copies that a choice between two states needs. Elsewhere
    a branch would wait for the host to read the condition.
    """

    def branch(finite: Array, state: TrainState) -> TrainState:
        return jax.lax.cond(finite, advanced, lambda state: state, state)

    def choose(finite: Array, state: TrainState) -> TrainState:
        return jax.tree.map(
            lambda now, before: jnp.where(finite, now, before), advanced(state), state
        )

    return jax.lax.platform_dependent(finite, state, cpu=branch, default=choose)


def no_overflows(loss_scale: LossScaling) -> OverflowCounts | None:
    """The counts at step 0; None where an overflow ends the run."""
    zero = jnp.zeros((), jnp.int32)
    return OverflowCounts(zero, zero, zero) if loss_scale.skips_overflow else None


def init_bad_step_counts(policy: BadStepPolicy) -> BadStepCounts | None:
    """The counts at step 0; None where the first bad step ends the run."""
    zero = jnp.zeros((), jnp.int32)
    return BadStepCounts(zero, zero) if policy.leaves_out else None


def updates_so_far(state: TrainState) -> Array:
    """How many updates were made, int32 (): what the learning rate depends on."""
    updates = state.step
    if state.overflows is not None:
        updates = updates - state.overflows.skipped_steps
    if state.bad_steps is not None:
        updates = updates - state.bad_steps.left_out
    return updates


def num_skipped(state: TrainState) -> int:
    """How many steps have no update because of a bad step."""
    return 0 if state.bad_steps is None else int(state.bad_steps.left_out)


def is_skipped(overflows: OverflowCounts | None, loss: Array, grad_norm: Array) -> Array:
    """Whether a step is one that the loss scale skips, bool ().

    A loss that is no number is none: no scale would have changed it.
    """
    if overflows is None:
        return jnp.zeros((), bool)
    overflow = jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)
    return overflow & (overflows.bad_steps < MAX_CONSECUTIVE_OVERFLOWS)


def count_overflow(
    loss_scale: LossScaling, state: TrainState, finite: Array, skipped: Array
) -> TrainState:
    """The state behind a step: the scale of the next, and the counts.

    A step that was neither finite nor skipped changes nothing.
    """
    before = state.overflows
    if before is None:
        return state
    scale, good_steps = loss_scale.next(state.loss_scale, before.good_steps, skipped)
    counts = OverflowCounts(
        good_steps, jnp.where(skipped, before.bad_steps + 1, 0), before.skipped_steps + skipped
    )
    after = (state.step + skipped, scale, counts)
    kept = (state.step, state.loss_scale, before)
    step, scale, counts = jax.tree.map(
        lambda now, then: jnp.where(finite | skipped, now, then), after, kept
    )
    return replace(state, step=step, loss_scale=scale, overflows=counts)


def skip_bad_step(
    policy: BadStepPolicy, state: TrainState, record: Record
) -> tuple[TrainState, Record]:
    """State and record behind a step that is left out where it is bad and the policy says so.

    Nothing changes but the step and the counts; an overflow in between does not end a row.
    """
    before = state.bad_steps
    if before is None or not policy.skips_in_a_row:
        return state, record
    bad = ~record.should_continue
    out = bad & (before.in_a_row < policy.skips_in_a_row)
    keeps = bad | (jnp.asarray(record.skipped) > 0)
    counts = BadStepCounts(jnp.where(keeps, before.in_a_row + out, 0), before.left_out + out)
    after = replace(state, step=state.step + out, bad_steps=counts)
    return after, record._replace(skipped=jnp.maximum(record.skipped, out.astype(jnp.float32)))
