"""Runs as the command line starts them: with profile, dumps and autopsy, and the summary returned
also after a signal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.stages.record.summary import Summary
from pipeline.stages.run import run as run_recipe
from pipeline.stages.runner.context import RunOptions


def run(recipe: Recipe, run_dir: Path | None = None, **options: Any) -> Summary:
    """Run a recipe; `options` are further fields of RunOptions."""
    return run_recipe(recipe, RunOptions(run_dir, **options))
