"""The types that a training step passes on (state, mapped batch, gradients, record), and functions
that select parameters by path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.tree_util import register_dataclass

from pipeline.models.layers.path_patterns import EXCEPT, LayerPath, is_frozen, require_covered
from pipeline.training.telemetry import StepOutcome

Array = jax.Array


@register_dataclass
@dataclass(frozen=True)
class TrainState:
    """Everything that training changes, the content of a checkpoint.

    `step` (int32 scalar) is the number of steps so far, including steps without an update. Random
    numbers are a function of (seed, step), so a generator's state isn't needed.
    """

    step: Array
    params: Any
    collections: Mapping[str, Any]
    """The network's other collections by name, such as flax's `batch_stats`."""
    opt_state: Any
    features: Mapping[str, Any]
    """The states of the step's features (`step_feature.py`) by name; not of those without one."""

    def replace_part(self, name: str, part: Any) -> TrainState:
        """Return the state with another state of the feature `name`."""
        return replace(self, features={**self.features, name: part})

    def replace_variables(self, variables: Mapping[str, Any]) -> TrainState:
        """Return the state with other parameters and collections."""
        collections = {name: tree for name, tree in variables.items() if name != "params"}
        return replace(self, params=variables["params"], collections=collections)

    @property
    def variables(self) -> dict[str, Any]:
        """The parameters and the other collections, to which the network is applied."""
        return {"params": self.params, **self.collections}


Inputs = Array | dict[str, Array]
"""Inputs of a network: an array (B, ...), or several by the network's names, after the map ops.
Images are (B, H, W, C) float32, tokens (B, T) int32."""


class MappedBatch(NamedTuple):
    """A batch, or a microbatch, after the map ops."""

    inputs: Inputs
    labels: Array
    """(B, ...) int or (B, ..., C) float."""
    mask: Array
    """bool (B,): True for samples, False for padding."""
    dropout_key: Array
    """A JAX key."""
    extras: Mapping[str, Array] = {}
    """Arrays (B, ...) of the features that have some for each sample, by name."""


class Gradients(NamedTuple):
    """Results of the backward pass over a batch."""

    values: Any
    """Gradients by trained parameter, float32; of the scaled loss until they are unscaled."""
    loss: Array
    """Loss of the batch without the loss scale, or a microbatch's share of it: a float32 scalar."""
    collections: Mapping[str, Any]
    """The network's collections after the pass."""
    sums: Mapping[str, Any] = {}
    """Sums over the samples of the batch, by the name of the feature that reads them."""
    readings: Mapping[str, Any] = {}
    """Arrays (B, ...) of the samples, by the name of the feature that reads them; with shards, of
    the whole batch."""


class Record(NamedTuple):
    """Record of one step, float32 scalars.

    Its columns are in the telemetry, as keys of metrics.jsonl, and as the tags of TensorBoard
    and trackers. `skipped` is 1 if the update was skipped, for an overflow or by `on_nan: skip`,
    else 0.
    """

    loss: Array
    learning_rate: Array
    grad_norm: Array
    loss_scale: Array
    skipped: Array | float = 0.0
    extras: tuple[Array, ...] = ()
    """The columns of the step's features, in their order."""

    @property
    def should_continue(self) -> Array:
        """Whether training continues after this step, bool ()."""
        outcome = StepOutcome.from_columns(jnp, self.loss, self.grad_norm, self.skipped)
        return outcome.should_continue

    def stack_row(self) -> Array:
        """Return the columns, float32 (columns,)."""
        *columns, extras = self
        return jnp.stack([*columns, *extras])


COLUMNS = Record._fields[:-1]
"""Names of the columns of every step's record; columns of features follow."""
FLAGS = frozenset({"skipped"})
"""Columns that are 0 or 1. Monitors write them only for the steps that have 1."""


def count_bytes(tree: Any) -> int:
    """Return the bytes of the arrays in a tree, such as a state."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def split_params(params: Any, frozen: Sequence[str]) -> tuple[Any, Any]:
    """Return the trained parameters, and the parameters that the patterns `frozen` cover. With
    gradients of the trained parameters alone, the backward pass ends at the first trained layer.
    With `stop_gradient` it would go on to the first layer."""
    if not frozen:
        return params, {}
    flat = flatten_dict(dict(params))
    frozen_paths = {path for path in flat if is_frozen(frozen, path)}
    trained_params = {path: leaf for path, leaf in flat.items() if path not in frozen_paths}
    frozen_params = {path: flat[path] for path in frozen_paths}
    return unflatten_dict(trained_params), unflatten_dict(frozen_params)


def merge_params(trained: Any, frozen: Any) -> Any:
    """Join the two results of `split_params`."""
    if not frozen:
        return trained
    return unflatten_dict({**flatten_dict(dict(trained)), **flatten_dict(dict(frozen))})


def list_paths(params: Mapping[str, Any]) -> list[LayerPath]:
    return list(flatten_dict(dict(params)))


def select_averaged(average: Any, params: Any) -> Any:
    """Return the parameters that have a moving average."""
    flat = flatten_dict(dict(params))
    return unflatten_dict({path: flat[path] for path in list_paths(average)})


def require_trainable(params: Any, frozen: Sequence[str]) -> None:
    """Raise ValueError for a pattern that covers no parameter, and if all parameters are frozen."""
    paths = list_paths(params)
    require_covered([pattern.removeprefix(EXCEPT) for pattern in frozen], paths, "parameters")
    trained, _ = split_params(params, frozen)
    if not jax.tree.leaves(trained):
        raise ValueError(
            f"{', '.join(frozen)} freezes all {len(paths)} parameters; nothing is left to train"
        )
