"""The change of the state by a step: its outcome, the update, and what its features do after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.training.state import Gradients, TrainState, merge_params, split_params
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import UpdateOptimizer
from pipeline.training.telemetry import StepOutcome

State = TypeVar("State")
"""A pytree of arrays."""


def decide_outcome(
    config: StepConfig, state: TrainState, loss: Array, grad_norm: Array
) -> StepOutcome:
    """Decide whether a step is applied, is skipped or ends the run. The masks are bool ()."""
    no = jnp.zeros((), bool)
    outcome = StepOutcome(jnp.isfinite(loss) & jnp.isfinite(grad_norm), no, no)
    for feature in config.features:
        outcome = feature.decide(state, outcome, loss, grad_norm)
    return outcome


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
    `gradients.sums` are computed from gradients of the scaled loss, and `unscale` is the inverse
    of the loss scale.
    """
    arguments: dict[str, Any] = {}
    for feature in config.features:
        arguments |= feature.list_optimizer_arguments(state, gradients, count, unscale)
    trained, frozen = split_params(state.params, config.frozen)

    update_optimizer: UpdateOptimizer = partial(
        _update_optimizer, config, state.opt_state, trained, arguments
    )
    for feature in config.features:
        update_optimizer = feature.change_optimizer(update_optimizer, state, gradients)
    directions, opt_state = update_optimizer(gradients.values)
    updated = apply_directions(config, trained, directions, rates)
    after = replace(
        state,
        step=state.step + 1,
        params=merge_params(updated, frozen),
        collections=gradients.collections,
        opt_state=opt_state,
    )
    for feature in config.features:
        after = feature.move_parameters(state, after, rates)
    for feature in config.features:
        after = feature.change_update(state, after, gradients, count)
    return after


def _update_optimizer(
    config: StepConfig, opt_state: Any, trained: Any, arguments: Mapping[str, Any], values: Any
) -> tuple[Any, Any]:
    return config.optimizer.update(values, opt_state, trained, **arguments)


def apply_directions(config: StepConfig, params: Any, directions: Any, rates: Array | float) -> Any:
    """Return p - rate * direction for each parameter p, with the rate that the features find."""
    features = config.list_acting("find_rate")
    if not features:
        return jax.tree.map(lambda p, d: p - rates * d, params, directions)
    rates = jnp.asarray(rates)
    flat = flatten_dict(dict(params))
    directions = flatten_dict(dict(directions))

    def find_rate(path: tuple[str, ...]) -> Array:
        return reduce(lambda rate, feature: feature.find_rate(path, rate), features, rates)

    return unflatten_dict(
        {path: p - find_rate(path) * directions[path] for path, p in flat.items()}
    )
