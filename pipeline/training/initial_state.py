"""The state of a run at step 0, and the keys that it is drawn with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from zlib import crc32

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax import Array

from pipeline.models.layers.path_patterns import covers, require_covered
from pipeline.training.state import TrainState, split_params

if TYPE_CHECKING:
    from pipeline.data.columns import ColumnSpec
    from pipeline.data.inputs import NetworkInputs
    from pipeline.models.layers.model_spec import InitRule
    from pipeline.training.step_config import StepConfig


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
