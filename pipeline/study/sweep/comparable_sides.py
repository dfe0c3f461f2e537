"""Check that a metric measures the same in the runs of two recipes."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.tree_diff import Difference, TreePath, list_differences
from pipeline.core.files.value_text import join_first, show
from pipeline.study.runs.ranking import TRAIN_LOSS

TRAINING_DATA = (("dataset", "train"), ("dataset", "exclude"))
"""Keys and sections of data in which sides may differ, since they don't change the evaluation."""
FOLDED_DATA = (("dataset", "train", "select"), ("dataset", "exclude"))
"""Keys of `TRAINING_DATA` that decide which samples are in the fold that is evaluated."""
EVALUATION = (("stages",), ("eval", "samples"), ("eval", "metrics"))
"""Keys and sections that decide what is measured."""
LOSSES = ("loss", TRAIN_LOSS)
MAX_NAMED = 4
"""Most keys by which sides are named."""


def require_comparable(recipe: Recipe, other: Recipe, metric: str | None) -> None:
    """Raise RecipeError if a key of side B changes what the metric measures, or if none differs."""
    changes = list_differences(other.model_dump(mode="json"), recipe.model_dump(mode="json"))
    if not changes:
        raise RecipeError("side B: has the recipe of side A; must differ in a key")
    problems = [
        f"{change} on side A; {reason}"
        for change in changes
        if (reason := _explain_refusal(change, recipe, metric)) is not None
    ]
    if problems:
        raise RecipeError(problems)


def describe_contrast(recipe: Recipe, other: Recipe) -> str:
    """Return the values that differ between side A and side B as a sentence, at most `MAX_NAMED`.

    Passwords are hidden.
    """
    changes = list_differences(other.model_dump(mode="json"), recipe.model_dump(mode="json"))
    side_a = [f"{change.key}={show(change.other_value)}" for change in changes]
    side_b = [f"{change.key}={show(change.value)}" for change in changes]
    return f"A has {join_first(side_a, MAX_NAMED)}; B has {join_first(side_b, MAX_NAMED)}"


def _explain_refusal(change: Difference, recipe: Recipe, metric: str | None) -> str | None:
    """Return the reason why sides can't differ in a key; None if they can."""
    path = change.path
    if path[-1] == "seed":
        return "must be equal: each pair has the same seed on both sides"
    if path[0] == "dataset" and not _is_below(path, TRAINING_DATA):
        return "must be equal: both sides are evaluated on the same samples"
    if recipe.dataset.folds is not None and _is_below(path, FOLDED_DATA):
        return "must be equal with dataset.folds: the fold would have other samples"
    if _is_below(path, EVALUATION):
        return "must be equal: both sides are measured in the same way"
    if metric in LOSSES and _is_below(path, (("train", "loss"),)):
        return f"must be equal with --metric {metric}, which would be two different losses"
    return None


def _is_below(path: TreePath, sections: Sequence[TreePath]) -> bool:
    return any(path[: len(section)] == section for section in sections)
