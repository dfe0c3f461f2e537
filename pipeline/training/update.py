"""The change of the state by a step: its outcome, the update, and the counts of skipped steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.path_patterns import LayerPath, covers
from pipeline.training.component_specs import AverageSpec
from pipeline.training.curvature import Curvature
from pipeline.training.loss_scales import LossScaling
from pipeline.training.non_finite_steps import NonFinitePolicy
from pipeline.training.privacy.add_noise import adapt_clip
from pipeline.training.state import (
    Gradients,
    NonFiniteStepCounts,
    OverflowCounts,
    StepConfig,
    TrainState,
    merge_params,
    select_averaged,
    split_params,
)
from pipeline.training.telemetry import StepOutcome, count_updates

State = TypeVar("State")
"""A pytree of arrays."""

MAX_CONSECUTIVE_OVERFLOWS = 1000
"""Consecutive overflows that a run survives: DynamicLossScaleManager's `bad_step_max`."""


def decide_outcome(
    policy: NonFinitePolicy, state: TrainState, loss: Array, grad_norm: Array
) -> StepOutcome:
    """Decide whether a step is applied, is skipped or ends the run. The masks are bool (). A
    non-finite loss isn't an overflow, since a smaller loss scale wouldn't make it finite."""
    finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
    overflow = skipped_non_finite = jnp.zeros((), bool)
    if state.overflows is not None:
        overflow = jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)
        overflow &= state.overflows.bad_steps < MAX_CONSECUTIVE_OVERFLOWS
    if state.bad_steps is not None and policy.skips_in_a_row:
        can_skip = state.bad_steps.in_a_row < policy.skips_in_a_row
        skipped_non_finite = ~(finite | overflow) & can_skip
    return StepOutcome(finite, overflow, skipped_non_finite)


def apply_if_finite(finite: Array, update: Callable[[State], State], state: State) -> State:
    """Return `update(state)` if `finite`, bool (), is true, else the same state.

    On the CPU this is a branch, which needs no copies. Other devices compute both states and select
    one, since they would wait at a branch until the host has read the condition. Outside of jit
    this is a Python `if`, since jax would compile a branch again in every step.
    """
    if not isinstance(finite, jax.core.Tracer):
        return update(state) if finite else state

    def branch(finite: Array, state: State) -> State:
        return jax.lax.cond(finite, update, lambda state: state, state)

    def select(finite: Array, state: State) -> State:
        result: State = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), update(state), state
        )
        return result

    result: State = jax.lax.platform_dependent(finite, state, cpu=branch, default=select)
    return result


def apply_update(
    config: StepConfig,
    state: TrainState,
    gradients: Gradients,
    count: Array | int,
    unscale: Array | float,
    rates: Array | float,
) -> TrainState:
    """Return the state after an update: p <- p - rate * direction, for trained parameters p.

    `rates` is one rate, (), or with rate groups (1 + groups,): the rate without a group, then each
    group's rate. `gradients.values` are unscaled gradients over `count` samples.
    `gradients.layers` are computed from gradients of the scaled loss, and `unscale` is the inverse
    of the loss scale.
    """
    extra_arguments = {}
    if config.curvature is not None:
        scale = unscale * count if config.reduction == "mean" else unscale
        due = config.curvature.is_due(count_updates(state))
        extra_arguments["curvature"] = Curvature(gradients.layers, count, scale, due)
    trained, frozen = split_params(state.params, config.frozen)
    directions, opt_state = config.optimizer.update(
        gradients.values, state.opt_state, trained, **extra_arguments
    )
    layer_factors = dict(config.layer_rates)
    updated = apply_directions(trained, directions, rates, config.rate_groups, layer_factors)
    params = merge_params(updated, frozen)
    average = state.average
    if config.average is not None:
        averaged_params = select_averaged(average, params)
        average = update_ema(average, averaged_params, config.average, count_updates(state))
    privacy = state.privacy
    if config.privacy is not None and privacy is not None and gradients.within is not None:
        privacy = adapt_clip(config.privacy, privacy, state.step, gradients.within, count)
    return replace(
        state,
        step=state.step + 1,
        params=params,
        batch_stats=gradients.batch_stats,
        opt_state=opt_state,
        average=average,
        privacy=privacy,
    )


def apply_directions(
    params: Any,
    directions: Any,
    rates: Array | float,
    groups: Sequence[str],
    layer_factors: Mapping[str, float],
) -> Any:
    """Return p - rate * direction for each parameter p. The rate comes from the last group that
    covers p, else `rates[0]`. It is multiplied by the factor of p's outermost scope, if
    `layer_factors` has one."""
    if not groups and not layer_factors:
        return jax.tree.map(lambda p, d: p - rates * d, params, directions)
    group_rates = jnp.asarray(rates)
    flat = flatten_dict(dict(params))
    directions = flatten_dict(dict(directions))

    def find_rate(path: LayerPath) -> Array:
        rate = group_rates
        if groups:
            covering = [column for column, pattern in enumerate(groups, 1) if covers(pattern, path)]
            rate = group_rates[covering[-1] if covering else 0]
        factor = layer_factors.get(path[0], 1.0)
        return rate if factor == 1.0 else rate * factor

    return unflatten_dict(
        {path: p - find_rate(path) * directions[path] for path, p in flat.items()}
    )


def update_ema(average: Any, params: Any, spec: AverageSpec, updates: Array) -> Any:
    """Return the moving average after an update. `updates`, int32 (), is the number of updates
    before it."""
    assert spec.decay is not None, "callers have an average, so its decay is set"
    count = updates.astype(jnp.float32)
    ramp = (1 + count) / (10 + count)
    decay = jnp.minimum(spec.decay, ramp) if spec.warmup else jnp.float32(spec.decay)
    return jax.tree.map(lambda a, p: a + (1 - decay) * (p - a), average, params)


def count_overflow(loss_scale: LossScaling, state: TrainState, outcome: StepOutcome) -> TrainState:
    """Return the state with the loss scale of the next step, and with an overflow counted. After a
    step that was neither applied nor an overflow, the state is the same."""
    before = state.overflows
    if before is None:
        return state
    overflow = outcome.overflow
    scale, good_steps = loss_scale.next(state.loss_scale, before.good_steps, overflow)
    counts = OverflowCounts(
        good_steps, jnp.where(overflow, before.bad_steps + 1, 0), before.skipped_steps + overflow
    )
    after = (state.step + overflow, scale, counts)
    unchanged = (state.step, state.loss_scale, before)
    step, scale, counts = jax.tree.map(
        lambda new, old: jnp.where(outcome.applied | overflow, new, old), after, unchanged
    )
    return replace(state, step=step, loss_scale=scale, overflows=counts)


def count_non_finite_step(
    policy: NonFinitePolicy, state: TrainState, outcome: StepOutcome
) -> TrainState:
    """Return the state with a skipped non-finite step counted, in `step` and `bad_steps`. An
    applied step sets the number of consecutive non-finite steps to 0; an overflow doesn't change
    it."""
    before = state.bad_steps
    if before is None or not policy.skips_in_a_row:
        return state
    skipped = outcome.skipped_non_finite
    in_a_row = jnp.where(outcome.applied, 0, before.in_a_row + skipped)
    counts = NonFiniteStepCounts(in_a_row, before.left_out + skipped)
    return replace(state, step=state.step + skipped, bad_steps=counts)
