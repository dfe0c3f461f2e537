"""The settings of a run's observers, from its recipe."""

from __future__ import annotations

from pipeline.config.precision import loss_scale_of
from pipeline.config.recipe import Recipe
from pipeline.engine.monitors.observers import ObserverSettings


def make_observer_settings(recipe: Recipe) -> ObserverSettings:
    """Return the settings that decide what a run's observers print and write."""
    return ObserverSettings(
        batch_size=recipe.train.batch_size,
        trains="train" in recipe.stages,
        lines=recipe.monitor.lines,
        loss_every=recipe.monitor.loss_every,
        skips_overflow=loss_scale_of(recipe).skips_overflow,
        board=recipe.model_dump(mode="json") if recipe.monitor.tensorboard else None,
    )
