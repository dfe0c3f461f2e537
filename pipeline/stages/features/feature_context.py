"""Facts of a run for the features that its recipe lists, and rules about features together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax import Array

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.value_text import show
from pipeline.core.host.array_values import find_shapes
from pipeline.data.dataset import Dataset
from pipeline.engine.schedule import RunSchedule
from pipeline.training.features.feature_spec import FeatureContext, TrainedNetwork
from pipeline.training.initial_state import shape_inputs
from pipeline.training.state import COLUMNS
from pipeline.training.step import make_train_step
from pipeline.training.step_feature import StepFeature, has_moment
from pipeline.training.telemetry import PLACES

if TYPE_CHECKING:
    from pipeline.training.step_config import StepConfig


BuildNetwork = Callable[[Recipe, int], nn.Module]
"""(recipe, number of outputs) -> network."""


def make_feature_context(
    recipe: Recipe,
    dataset: Dataset,
    step_config: StepConfig,
    variables: Mapping[str, Any],
    planned: RunSchedule,
    build_network: BuildNetwork,
) -> FeatureContext:
    """Return the facts of a run. `variables` are shapes, and `planned` is the run's planned
    length."""
    return FeatureContext(
        batch_size=recipe.train.batch_size,
        steps_per_epoch=planned.steps_per_epoch,
        total_steps=planned.total,
        reads_tokens=any(array.dtype == "int32" for array in step_config.inputs.arrays),
        params=variables["params"],
        count_flops=partial(_count_flops, step_config, variables, recipe.train.batch_size),
        load_network=partial(_load_network, build_network, step_config),
    )


def _count_flops(step_config: StepConfig, variables: Mapping[str, Any], batch_size: int) -> float:
    """Return the operations of the forward pass on a batch, as XLA counts them before it optimizes
    the program."""
    inputs = shape_inputs(step_config.inputs, batch_size)
    forward = partial(step_config.network.apply, train=False)
    cost: Any = jax.jit(forward).lower(variables, inputs).cost_analysis()
    return float(cost["flops"])


def _load_network(
    build_network: BuildNetwork, step_config: StepConfig, run_dir: Path
) -> TrainedNetwork:
    """Return the network of a run, which must have the inputs and outputs of `step_config`."""
    from pipeline.stages.record.trained_run import read_trained_run

    try:
        run = read_trained_run(run_dir)
    except DataError as error:
        raise ValueError(f"teacher: {error}") from error
    expected, found = len(step_config.targets), len(run.samples.targets)
    if expected != found:
        raise ValueError(f"{run_dir}: has {found} outputs; must have {expected}, as this network")
    network = build_network(run.recipe, found)
    weights = {path: jnp.asarray(array) for path, array in run.arrays.items()}
    variables = unflatten_dict(weights, sep="/")

    def apply(variables: Mapping[str, Any], inputs: Any) -> Array:
        logits: Any = network.apply(variables, inputs, train=False)
        return logits

    inputs = shape_inputs(step_config.inputs, 1)
    jax.eval_shape(apply, variables, inputs)  # Raises ValueError for inputs of another size.
    return TrainedNetwork(apply, variables)


def require_distinct(features: Sequence[StepFeature]) -> None:
    """Raise RecipeError if two features have the same name or column, or both compute the gradients
    or choose the weights that evaluations use."""
    names = Counter(feature.name for feature in features)
    for name, count in names.items():
        if count > 1:
            raise RecipeError(f"train.features: has {count} features {name}; must have one")
    differentiating = [f.name for f in features if has_moment(f, "differentiate")]
    if len(differentiating) > 1:
        both = " and ".join(differentiating[:2])
        raise RecipeError(f"{both}: both compute the gradients; leave one out")
    evaluated = [f.name for f in features if has_moment(f, "change_weights")]
    if len(evaluated) > 1:
        both = " and ".join(evaluated[:2])
        raise RecipeError(f"{both}: both choose the weights of evaluations; leave one out")
    owners = dict.fromkeys((*COLUMNS, *PLACES), "every step")
    for feature in features:
        for column in feature.columns:
            if column in owners:
                problem = f"is a column of {owners[column]} already; must have another name"
                raise RecipeError(f"train.features: {column} of {feature.name} {problem}")
            owners[column] = feature.name


def require_same_form(step_config: StepConfig, state: Any, batch: Any, rates: Any) -> None:
    """Raise ValueError if a step changes the form of a feature's state, or the state of one with
    `change_weights` lacks these weights. All have shapes in place of arrays."""
    for feature in step_config.list_acting("change_weights"):
        part = state.features.get(feature.name)
        if feature.name != "average" and not (isinstance(part, dict) and "evaluated" in part):
            raise ValueError(
                f"{feature.name}: has change_weights, so its state must be a dict that has the "
                "weights of evaluations as `evaluated`, in the form of the trained parameters"
            )
    after, _ = find_shapes(make_train_step(step_config).step, state, batch, rates)
    for name, before in state.features.items():
        old, new = (show(jax.tree.map(_get_form, part)) for part in (before, after.features[name]))
        if old != new:
            raise ValueError(f"{name}: its state becomes {new}; must stay {old}")


def _get_form(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}"
