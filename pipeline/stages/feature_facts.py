"""Facts of the data that few features need: the privacy budget, and the scale of pixels."""

from __future__ import annotations

from typing import Literal

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.build_checks import require_attackable
from pipeline.stages.key_errors import blaming_key
from pipeline.training.privacy.budget import Budget
from pipeline.training.robustness.adversarial_rule import PixelScale, find_pixel_scale, find_white


def plan_privacy(recipe: Recipe, dataset: Dataset, steps: int, reporter: Reporter) -> Budget:
    """Return the privacy budget of a run of `steps` steps.

    Raises RecipeError if no noise is enough, or if a table is encoded by all samples.
    """
    assert recipe.privacy is not None, "the run is private"
    if dataset.table is not None:
        raise RecipeError(
            f"dataset = {recipe.dataset.name}: encodes rows by means of all samples, which has no "
            "noise; must be another dataset with privacy"
        )
    budget = Budget(recipe.privacy, dataset.train_order, steps)
    with reporter.clock("accounting for privacy"):
        line = str(budget)  # computes noise and epsilon, which takes seconds
    reporter.print_stage("privacy", line)
    return budget


def make_pixel_scale(
    recipe: Recipe, dataset: Dataset, split: Literal["train", "eval"]
) -> PixelScale:
    """Return the scale of pixels after the map ops of a split.

    Raises RecipeError unless samples are images with one class each.
    """
    require_attackable(recipe, dataset)
    ops = dataset.train_ops if split == "train" else dataset.eval_ops
    with blaming_key(f"dataset.{split}"):
        assert dataset.raw_image is not None, "attackable samples are images"
        return find_pixel_scale(ops, find_white(dataset.raw_image, recipe.dataset.brightest))
