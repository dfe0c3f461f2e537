"""Check that a run has learnt: its loss fell, and it answers better than a constant."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.stages.data import read_selected
from pipeline.study.expect.expectations import MAX_STEP
from pipeline.study.expect.sides import read_figure, read_series

MIN_STEPS = 20
"""Fewest steps whose losses can tell a fall from noise."""
STANDARD_ERRORS = 3
"""Least distance of an accuracy from the most frequent class's."""


def judge_learning(run_dir: Path, recipe: Recipe) -> tuple[bool | None, str]:
    """Return whether a run has learnt and why; None if that can't be decided.

    A loss that falls isn't enough: a network that learns the share of each class alone lowers it.
    Raises DataError if the log or the data can't be read.
    """
    losses = list(read_series(run_dir, "loss", MAX_STEP).values())
    if len(losses) < MIN_STEPS:
        return None, f"{len(losses)} steps are too few to tell; must be {MIN_STEPS}"
    count = len(losses) // 10
    first, last = np.mean(losses[:count]), np.mean(losses[-count:])
    fall = f"loss {first:.4g} in the first tenth, {last:.4g} in the last"
    if not last < first:
        return False, fall
    accuracy = read_figure(run_dir, "accuracy", None)
    samples = read_figure(run_dir, "count", None)
    if accuracy is not None and samples:
        share = _find_largest_share(recipe)
        if share is not None:
            least = share + STANDARD_ERRORS * math.sqrt(share * (1 - share) / samples)
            text = f"accuracy {accuracy:.4f}, the most frequent class alone {share:.4f}"
            return accuracy > least, f"{fall}; {text}"
    r2 = read_figure(run_dir, "r2", None)
    if r2 is not None:
        return r2 > 0, f"{fall}; r2 {r2:.4f}, a constant 0"
    return True, fall


def _find_largest_share(recipe: Recipe) -> float | None:
    """Return the share of the most frequent class in the evaluation split; None without classes."""
    labels = read_selected(recipe).eval.columns.get("label")
    if labels is None or not isinstance(labels, np.ndarray) or labels.ndim != 1:
        return None
    if not np.issubdtype(labels.dtype, np.integer):
        return None
    counts = np.unique(labels, return_counts=True)[1]
    return float(counts.max() / counts.sum())
