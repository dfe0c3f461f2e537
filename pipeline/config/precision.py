"""The precision and the loss scale of a recipe, with auto resolved."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.models.layers.precision import LEVELS, Level, Precision
from pipeline.training.features.loss_scales import LossScaling


def resolve_level(recipe: Recipe) -> Level:
    """Return the precision level of a recipe; auto is resolved by the device."""
    level = recipe.train.precision
    return recipe.device.auto_precision if level == "auto" else level


def resolve_precision(recipe: Recipe) -> Precision:
    """Return the dtypes that the layers compute in: the level's, then `to_float`'s."""
    level = LEVELS[resolve_level(recipe)]
    if recipe.train.keep_batchnorm_fp32 is not None:
        level = level.with_batch_norm(in_float32=recipe.train.keep_batchnorm_fp32)
    return Precision(level.dtype, (*level.rules, *recipe.train.to_float))


def resolve_loss_scale(recipe: Recipe) -> LossScaling:
    """Return the loss scale of a recipe; auto is resolved by the level."""
    return recipe.train.loss_scale.resolve(resolve_level(recipe))
