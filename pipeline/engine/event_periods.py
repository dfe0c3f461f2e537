"""Event periods: after how many steps evaluations and checkpoints are due."""

from __future__ import annotations

from pipeline.config.recipe import Recipe
from pipeline.engine.schedule import Event


def event_periods(recipe: Recipe, per_pass: int) -> dict[Event, tuple[int, ...]]:
    """Return the periods, in steps, of evaluations, checkpoints and collections for TensorBoard;
    `per_pass` steps a pass."""
    evals = _in_steps(recipe.eval.every_steps, recipe.eval.every_passes, per_pass)
    saves = _in_steps(recipe.checkpoint.every_steps, recipe.checkpoint.every_passes, per_pass)
    if recipe.checkpoint.best is not None:
        saves += evals
    monitor = recipe.monitor
    collected = monitor.collect_every if monitor.tensorboard else None
    collects = () if collected is None else (collected,)
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves, Event.COLLECT: collects}


def _in_steps(steps: int | None, passes: int | None, per_pass: int) -> tuple[int, ...]:
    return tuple(n for n in (steps, passes and passes * per_pass) if n)
