"""The features of a recipe's step, in the order in which the step calls them.

Features that a recipe lists get facts of the run, and have rules about features together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.traverse_util import unflatten_dict
from jax import Array

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_loss_scale
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.value_text import show
from pipeline.core.host.array_values import find_shapes
from pipeline.data.columns import Targets
from pipeline.data.inputs import Dataset
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.key_errors import blaming_key
from pipeline.training.features.freezing import FreezePhase, Freezing
from pipeline.training.features.loss_scales import ScaledLoss
from pipeline.training.state import COLUMNS
from pipeline.training.step import make_train_step
from pipeline.training.step_feature import FeatureContext, StepFeature, TrainedNetwork, has_moment
from pipeline.training.telemetry import PLACES
from pipeline.training.update import shape_inputs

if TYPE_CHECKING:
    from pipeline.training.privacy.private_gradients import PrivacyRule
    from pipeline.training.robustness.adversarial_rule import PixelScale
    from pipeline.training.step_config import StepConfig

BuildNetwork = Callable[[Recipe, Targets], nn.Module]
"""(recipe, what it predicts) -> network."""


@dataclass(frozen=True)
class FeatureInputs:
    """Facts of the data and of the network that features need."""

    samples: int = 0
    """Number of training samples."""
    privacy_rule: PrivacyRule | None = None
    """Clipping and noise of a private run's gradients; None: the run isn't private."""
    pixel_scale: PixelScale | None = None
    """The scale of pixels after the training map ops; None: images aren't attacked."""
    phases: tuple[FreezePhase, ...] = ()
    """Phases after the first, each with more trained parameters."""
    layer_rates: tuple[tuple[str, float], ...] = ()
    """Factors on learning rates by outermost scope."""
    context: FeatureContext | None = None
    """Facts for the features that the recipe lists; None: these are left out."""


NO_INPUTS = FeatureInputs()
MakeFeature = Callable[[Recipe, FeatureInputs], StepFeature | Sequence[StepFeature] | None]
"""Makes a feature, or several; returns None for a recipe that doesn't use it. A module is imported
when a recipe uses its feature."""


def make_step_features(recipe: Recipe, inputs: FeatureInputs) -> tuple[StepFeature, ...]:
    """Return the features of a recipe's step, in the order of `FEATURES`."""
    features: list[StepFeature] = []
    for make in FEATURES:
        made = make(recipe, inputs)
        if made is not None:
            features += [made] if isinstance(made, StepFeature) else made
    return tuple(features)


def _make_freezing(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    train = recipe.train
    if not train.freeze:
        return None
    return Freezing(train.freeze, inputs.phases, train.freeze_statistics == "frozen")


def _make_scaled_loss(recipe: Recipe, inputs: FeatureInputs) -> StepFeature:
    return ScaledLoss(resolve_loss_scale(recipe))


def _make_non_finite_steps(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if not recipe.train.on_nan.counts_steps:
        return None
    from pipeline.training.features.non_finite_steps import NonFiniteSteps

    return NonFiniteSteps(recipe.train.on_nan)


def _make_attack(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.adversarial is None or inputs.pixel_scale is None:
        return None
    from pipeline.training.robustness.adversarial_rule import AdversarialRule

    return AdversarialRule(recipe.train.adversarial, inputs.pixel_scale)


def _make_hardest_samples(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.loss.hardest_share == 1:
        return None
    from pipeline.training.features.hardest_samples import HardestSamples

    return HardestSamples(recipe.train.loss.hardest_share)


def _make_private_gradients(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if inputs.privacy_rule is None:
        return None
    from pipeline.training.privacy.private_gradients import PrivateGradients

    return PrivateGradients(inputs.privacy_rule)


def _make_curvature(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    optimizer = recipe.train.optimizer
    with blaming_key(f"train.optimizer = {optimizer.name}"):
        rule = optimizer.curvature()
    if rule is None:
        return None
    from pipeline.training.features.curvature import LayerCurvature

    return LayerCurvature(rule, is_mean=recipe.train.loss.reduction == "mean")


def _make_gradient_rule(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.gradients.name == "plain":
        return None
    from pipeline.training.features.gradient_rules import GradientRule

    gradients = recipe.train.gradients
    with blaming_key(f"train.gradients = {gradients.name}"):
        return GradientRule(gradients.build())


def _make_accumulation(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.accumulate_steps == 1:
        return None
    from pipeline.training.features.accumulation import Accumulation

    return Accumulation(recipe.train.accumulate_steps)


def _make_rate_groups(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    rules = recipe.train.rate_columns
    if not rules:
        return None
    from pipeline.training.features.parameter_rates import RateGroups

    return RateGroups(tuple(rule.pattern for rule in rules))


def _make_layer_rates(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if not inputs.layer_rates:
        return None
    from pipeline.training.features.parameter_rates import LayerRates

    return LayerRates(dict(inputs.layer_rates))


def _make_schedule_free(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    optimizer = recipe.train.optimizer
    with blaming_key(f"train.optimizer = {optimizer.name}"):
        rule = optimizer.iterate_average()
    if rule is None:
        return None
    from pipeline.training.features.averages import ScheduleFree

    return ScheduleFree(rule)


def _make_listed(recipe: Recipe, inputs: FeatureInputs) -> Sequence[StepFeature]:
    """Return the features of `train.features`, those that average weights last, and before
    `train.ema`, since the others may change the parameters."""
    if inputs.context is None:
        return ()
    features = []
    for position, spec in enumerate(recipe.train.features):
        with blaming_key(f"train.features.{position} ({spec.name})"):
            features.append(spec.build(inputs.context))
    return sorted(features, key=lambda feature: has_moment(feature, "change_weights"))


def _make_average(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.ema.decay is None:
        return None
    from pipeline.training.features.averages import MovingAverage

    return MovingAverage(recipe.train.ema)


def _make_ledger(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if not recipe.train.ledger:
        return None
    from pipeline.training.features.ledger import Ledger

    return Ledger(inputs.samples)


FEATURES: tuple[MakeFeature, ...] = (
    _make_freezing,
    _make_scaled_loss,
    _make_non_finite_steps,
    _make_attack,
    _make_hardest_samples,
    _make_private_gradients,
    _make_curvature,
    _make_gradient_rule,
    _make_accumulation,
    _make_rate_groups,
    _make_layer_rates,
    _make_schedule_free,
    _make_listed,
    _make_average,
    _make_ledger,
)


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
        samples=len(dataset.train),
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
    network = build_network(run.recipe, run.samples.targets)
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
    choices = {"differentiate": "compute the gradients"}
    choices["change_weights"] = "choose the weights of evaluations"
    for moment, choice in choices.items():
        acting = [feature.name for feature in features if has_moment(feature, moment)]
        if len(acting) > 1:
            both = " and ".join(acting[:2])
            raise RecipeError(f"{both}: both {choice}; leave one out")
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


def require_same_shapes(compute: Callable[..., Any], trained: Any, result: Any) -> None:
    """Raise ValueError unless a gradient rule keeps the shapes of trained parameters and of the
    backward pass's other results. Both have shapes in place of arrays."""

    def apply_rule(trained: Any, result: Any, key: Array) -> Any:
        return compute(lambda parameters: (parameters, result), trained, key)

    gradients, returned = find_shapes(apply_rule, trained, result, jax.random.key(0))
    shapes = jax.tree.map(jnp.shape, gradients)
    if shapes != jax.tree.map(jnp.shape, trained):
        raise ValueError(f"returns gradients of shapes {show(shapes)}; must be like the parameters")
    if jax.tree.map(jnp.shape, returned) != jax.tree.map(jnp.shape, result):
        raise ValueError("must return the other results of the backward pass too")
