"""A training pipeline whose recipe is data.

`load_recipe` composes a recipe, `run` executes it; a `Trainer` also gives access to what comes of
it, and `load_run` reads that back. `Interrupted` is raised where a signal stopped them.
`pipeline.api` has what custom code needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pipeline.api.loaded_run import LoadedRun
    from pipeline.api.trainer import Trainer
    from pipeline.config.recipe import Recipe
    from pipeline.core.host.signals import Interrupted
    from pipeline.engine.callbacks.callback import Callback
    from pipeline.stages.record.summary import Summary

__all__ = ["Interrupted", "Trainer", "load_recipe", "load_run", "run"]


def load_recipe(name: str = "lenet5_digits", overrides: Sequence[str] = ()) -> Recipe:
    """Compose a recipe by name or YAML file, with overrides as on the command line.

    Raises RecipeError with every problem found.
    """
    from pipeline.config.compose import load_recipe

    return load_recipe(name, overrides)


def run(recipe: Recipe, run_dir: Path | None = None, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run the stages that a recipe names, and return a summary of the result.

    Writes into `run_dir`, or a new directory under `outputs/`. `callbacks` are called after those
    of the recipe. Raises PipelineError where the run fails, and Interrupted, once the run is saved,
    where a signal to stop came.
    """
    from pipeline.inspect.dumps.run_inspection import RunInspection
    from pipeline.stages.run import run
    from pipeline.stages.runner.context import RunOptions

    options = RunOptions(run_dir, callbacks=callbacks, inspection=RunInspection())
    summary = run(recipe, options)
    options.signals.check()
    return summary


def load_run(run_dir: Path | str) -> LoadedRun:
    """Read a run from its directory: parameters, history, recipe, predictions and plots.

    Raises DataError where it is no run, is damaged or has saved nothing, RecipeError where its
    recipe is no longer valid.
    """
    from pipeline.api.loaded_run import load_run

    return load_run(run_dir)


def __getattr__(name: str) -> Any:
    """Import the trainer, and jax with it, when it is first asked for; so too the exception."""
    if name == "Interrupted":
        from pipeline.core.host.signals import Interrupted

        return Interrupted
    if name == "Trainer":
        from pipeline.api.trainer import Trainer

        return Trainer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
