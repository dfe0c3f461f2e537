"""A training pipeline whose recipe is data: `load_recipe` composes a recipe, `run` executes it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe
    from pipeline.runner.record.summary import Summary

__all__ = ["load_recipe", "run"]


def load_recipe(name: str = "lenet5_digits", overrides: Sequence[str] = ()) -> Recipe:
    """Compose a recipe by name or YAML file, with overrides as on the command line.

    Raises RecipeError with every problem found.
    """
    from pipeline.config.compose import load_recipe

    return load_recipe(name, overrides)


def run(recipe: Recipe, run_dir: Path | None = None) -> Summary:
    """Run the stages that a recipe names, and return a summary of the result.

    Writes into `run_dir`, or a new directory under `outputs/`. Raises PipelineError where the run
    fails.
    """
    from pipeline.runner.run import run

    return run(recipe, run_dir)
