"""Runs a recipe from Python."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.config.recipe import Recipe
from pipeline.engine.callbacks.callback import Callback
from pipeline.inspect.dumps.run_inspection import RunInspection
from pipeline.stages import run as stages
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.context import RunOptions


def run(recipe: Recipe, run_dir: Path | None = None, callbacks: Sequence[Callback] = ()) -> Summary:
    """Run the stages that a recipe names, and return a summary of the result.

    Writes into `run_dir`, or a new directory under `outputs/`. `callbacks` are called after those
    of the recipe. Raises PipelineError if the run fails, and Interrupted, once the run is saved, if
    a signal stopped it.
    """
    options = RunOptions(run_dir, callbacks=callbacks, inspection=RunInspection())
    summary = stages.run(recipe, options)
    options.signals.check()
    return summary
