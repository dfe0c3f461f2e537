"""The state of a run at step 0 with the keys that it is drawn with, and its change by a step: the
outcome, the update, and what features do after it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.path_patterns import covers, require_covered
from pipeline.training.state import Gradients, TrainState, merge_params, split_params
from pipeline.training.step_config import StepConfig
from pipeline.training.step_feature import UpdateOptimizer
from pipeline.training.telemetry import StepOutcome

if TYPE_CHECKING:
    from pipeline.data.columns import ColumnSpec
    from pipeline.data.inputs import NetworkInputs
    from pipeline.models.layers.model_spec import InitRule


def init_with_output(config: StepConfig, seed: Array) -> tuple[Array, Mapping[str, Any]]:
    """Return the logits of one sample of zeros, and the initial parameters and collections. Raises
    ValueError if layers don't fit together, or a rule for initialisation doesn't fit."""
    inputs = config.inputs.pack(lambda array: jnp.zeros((1, *array.shape), array.dtype))
    logits, variables = config.network.init_with_output(make_key(seed, 0), inputs, train=False)
    params = reinitialize(variables.get("params", {}), config.init_rules, make_key(seed, 2))
    return logits, {**variables, "params": params}


def init_state(config: StepConfig, variables: Mapping[str, Any]) -> TrainState:
    """Return the state at step 0, from initial parameters and collections."""
    params = variables.get("params", {})
    trained, _ = split_params(params, config.never_trained)
    opt_state = config.optimizer.init(trained)
    parts = {feature.name: feature.init(trained) for feature in config.features}
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        collections={name: tree for name, tree in variables.items() if name != "params"},
        opt_state=opt_state,
        features={name: part for name, part in parts.items() if part is not None},
    )


def make_key(seed: Array, stream: int) -> Array:
    """Return a JAX key from a seed, uint32 (2,). Stream 0 is for initialisation, stream 1 for
    dropout, stream 2 for initialisation by rules."""
    key = jax.random.wrap_key_data(seed.astype(jnp.uint32), impl="threefry2x32")
    return jax.random.fold_in(key, stream)


def reinitialize(params: Any, rules: Sequence[InitRule], key: Array) -> Any:
    """Return parameters in which each one that a rule covers is drawn again, by the last such rule.
    The key of a parameter is derived from `key` and the parameter's path. Raises ValueError if an
    initializer doesn't suit the shape, and for a rule that covers nothing."""
    if not rules:
        return params
    flat = flatten_dict(dict(params))
    patterns = [rule.pattern for rule in rules]
    require_covered(patterns, list(flat), "parameters", prefix="init.rules: ")
    for path, leaf in flat.items():
        covering = [rule for rule in rules if covers(rule.pattern, path)]
        if covering:
            param_key = jax.random.fold_in(key, crc32("/".join(path).encode()))
            flat[path] = covering[-1].init.build()(param_key, leaf.shape, jnp.float32)
    return unflatten_dict(flat)


def shape_inputs(inputs: NetworkInputs, batch: int) -> Any:
    """Return the shapes and dtypes of the network's inputs for a batch of this size."""
    return inputs.pack(lambda array: jax.ShapeDtypeStruct((batch, *array.shape), array.dtype))


def shape_batch(inputs: NetworkInputs, label: ColumnSpec, size: int) -> tuple[Any, Any]:
    """Return the shapes and dtypes of the inputs and labels of `size` samples after map ops."""
    return shape_inputs(inputs, size), jax.ShapeDtypeStruct((size, *label.shape), label.dtype)


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

    def update_optimizer(values: Any) -> tuple[Any, Any]:
        return config.optimizer.update(values, state.opt_state, trained, **arguments)

    update: UpdateOptimizer = update_optimizer
    for feature in config.features:
        update = feature.change_optimizer(update, state, gradients)
    directions, opt_state = update(gradients.values)
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
