"""Facts that few features need: the privacy budget, whether samples can be attacked, the scale of
pixels, and whether shardings fit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.array_values import find_shapes
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.stages.key_errors import blaming_key, require_all
from pipeline.training.parallel.sharding_rules import (
    ShardingRules,
    list_layer_ranks,
    make_sharding_rules,
)
from pipeline.training.privacy.budget import Budget
from pipeline.training.robustness.adversarial_rule import PixelScale, find_pixel_scale, find_white
from pipeline.training.step_config import StepConfig
from pipeline.training.update import init_with_output


def require_attackable(recipe: Recipe, dataset: Dataset) -> None:
    """Raise RecipeError unless samples are images with one class each. Attacks need these."""
    problem = None
    image = dataset.raw_image
    if dataset.table is not None:
        problem = "has the columns of a table, which have no pixels to change"
    elif image is None or dataset.text is not None or image.dtype not in ("uint8", "float32"):
        problem = f"has {dataset.inputs}, which have no pixels to change"
    elif dataset.targets.task != "classification" or dataset.label_positions:
        problem = f"has {dataset.targets}, not one class for each image"
    elif recipe.dataset.buckets:
        problem = "has images of several sizes, by dataset.buckets"
    if problem is not None:
        raise RecipeError(
            f"dataset = {recipe.dataset.name}: {problem}; attacks need images with one class each"
        )


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


def require_shardings(
    recipe: Recipe, step_config: StepConfig, params: Mapping[str, Any], seed: np.ndarray
) -> None:
    """Require that shardings fit the mesh, and that each constraint matches a layer with the same
    number of axes. Raises one RecipeError with the problems of both."""
    parallel = recipe.parallel

    def check_specs(rules: ShardingRules) -> None:
        with blaming_key("parallel.specs"):
            rules.require_fit(params, parallel.mesh_sizes, parallel.batch_axes)

    def check_constraints(rules: ShardingRules) -> None:
        trace = partial(find_shapes, partial(init_with_output, step_config), seed)
        with blaming_key("parallel.constraints"):
            rules.require_layers(list_layer_ranks(trace) if rules.constraints else {})

    rules = make_sharding_rules(parallel)
    assert rules is not None, "the mode is semi_auto"
    require_all((check_specs, check_constraints), rules)
