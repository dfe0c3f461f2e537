"""Settings of a run's observers (logs, printed lines, TensorBoard), made from its recipe."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_loss_scale
from pipeline.engine.monitors.observers import ObserverSettings


def make_observer_settings(recipe: Recipe) -> ObserverSettings:
    """Return the settings that a recipe has for its run's observers."""
    return ObserverSettings(
        batch_size=recipe.train.batch_size,
        trains="train" in recipe.stages,
        lines=recipe.monitor.lines,
        loss_every=recipe.monitor.loss_every,
        skips_overflow=resolve_loss_scale(recipe).skips_overflow,
        board=recipe.model_dump(mode="json") if recipe.monitor.tensorboard else None,
    )
