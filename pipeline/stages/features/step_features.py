"""The features of a recipe's step, in the order in which the step calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_loss_scale
from pipeline.stages.key_errors import blaming_key
from pipeline.training.features.feature_spec import FeatureContext
from pipeline.training.features.freezing import FreezePhase, Freezing
from pipeline.training.features.loss_scales import ScaledLoss
from pipeline.training.step_feature import StepFeature, has_moment

if TYPE_CHECKING:
    from pipeline.training.privacy.add_noise import PrivacyRule
    from pipeline.training.robustness.pixel_scale import PixelScale


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
    rule = recipe.train.optimizer.curvature()
    if rule is None:
        return None
    from pipeline.training.features.curvature import LayerCurvature

    return LayerCurvature(rule, is_mean=recipe.train.loss.reduction == "mean")


def _make_gradient_rule(recipe: Recipe, inputs: FeatureInputs) -> StepFeature | None:
    if recipe.train.gradients.name == "plain":
        return None
    from pipeline.training.features.gradient_rules import GradientRule

    return GradientRule(recipe.train.gradients.build())


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
    rule = recipe.train.optimizer.iterate_average()
    if rule is None:
        return None
    from pipeline.training.features.schedule_free import ScheduleFree

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
    from pipeline.training.features.average import MovingAverage

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
