"""The precision of a recipe, given its device and its types by layer."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.models.layers.precision import LEVELS, Level, Precision
from pipeline.training.loss_scales import LossScaling


def level_of(recipe: Recipe) -> Level:
    """Return the precision level of a recipe; auto is resolved by the device."""
    level = recipe.train.precision
    return recipe.device.auto_precision if level == "auto" else level


def precision_of(recipe: Recipe) -> Precision:
    """Return the dtypes that the layers compute in; `to_float` is allowed with O0 only."""
    level = LEVELS[level_of(recipe)]
    return Precision(level.dtype, (*level.rules, *recipe.train.to_float))


def loss_scale_of(recipe: Recipe) -> LossScaling:
    """Return the loss scale of a recipe; auto is resolved by the level."""
    return recipe.train.loss_scale.at(level_of(recipe))
