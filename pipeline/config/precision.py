"""What a recipe computes in, once the device and the types by layer are taken into account."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.models.layers.precision import LEVELS, Level, Precision
from pipeline.training.loss_scales import LossScaling


def level_of(recipe: Recipe) -> Level:
    """The level of a recipe; auto is what the device says."""
    asked = recipe.train.precision
    return recipe.device.auto_precision if asked == "auto" else asked


def precision_of(recipe: Recipe) -> Precision:
    """What its layers compute in; `to_float` goes with O0 only."""
    level = LEVELS[level_of(recipe)]
    return Precision(level.dtype, (*level.rules, *recipe.train.to_float))


def loss_scale_of(recipe: Recipe) -> LossScaling:
    """Its loss scale; auto is what the level brings."""
    return recipe.train.loss_scale.at(level_of(recipe))
