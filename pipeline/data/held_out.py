"""Draws of the evaluation samples, or of folds, from one collection of samples."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

from pipeline.data.order import draw_permutation

Share = Annotated[float, Field(gt=0, lt=1)]
"""The share of the samples for evaluation."""
_STREAM = 1 << 62
"""Added to the class in the key of `hold_out`, so that no epoch has the same key."""
_FOLD_STREAM = 1 << 61
"""Number in the key by which folds are drawn, so that no epoch has the same key."""


def hold_out(
    groups: np.ndarray, names: Sequence[object], share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for evaluation, int64, each in ascending order.

    `groups` are the classes of the samples, int (n,), and `names` the names of the classes. Of each
    class `share` is evaluated, rounded to whole samples, but each split has at least one sample of
    it. The rows of a class are a pure function of the seed and the class. Raises ValueError with
    the name of a class that has one sample.
    """
    is_eval = np.zeros(len(groups), bool)
    for group in np.unique(groups).tolist():
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise ValueError(f"{names[group]} has 1 sample; a split needs at least 2 of each class")
        count = min(max(int(share * len(rows) + 0.5), 1), len(rows) - 1)
        order = draw_permutation(seed, _STREAM + group, len(rows))
        is_eval[rows[order[:count]]] = True
    return np.flatnonzero(~is_eval), np.flatnonzero(is_eval)


def split_rows(
    rows: int, share: float, seed: int, strata: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for evaluation, int64, each in ascending order.

    `share` of the rows is for evaluation, rounded down. Which rows depends on the seed alone. With
    `strata`, int (rows,), the evaluation differs by less than one row from `share` of each stratum,
    and the training has at least one row of each, for which the evaluation may have fewer rows.
    """
    order = _draw_order(rows, seed, 0, strata)
    # Evaluation rows are 1 / share apart in this order, which has stratum after stratum.
    is_eval = np.floor(np.arange(1, rows + 1) * share) > np.floor(np.arange(rows) * share)
    if strata is not None:
        _leave_one_for_training(is_eval, strata[order], share)
    return np.sort(order[~is_eval]), np.sort(order[is_eval])


def _leave_one_for_training(is_eval: np.ndarray, strata: np.ndarray, share: float) -> None:
    """Take one row of each stratum whose rows are all evaluated out of the evaluation, bool (rows,)
    in place, for one row each of the strata that miss most of `share`. `strata` is sorted."""
    starts = np.flatnonzero(np.diff(strata, prepend=strata[:1] - 1))
    sizes = np.diff(starts, append=len(strata))
    evaluated = np.add.reduceat(is_eval, starts, dtype=np.int64)
    is_full = evaluated == sizes
    is_eval[starts[is_full]] = False
    missing = sizes * share - evaluated
    open_strata = np.flatnonzero((missing > 0) & (evaluated < sizes - 1))
    by_missing = open_strata[np.argsort(-missing[open_strata], kind="stable")]
    trained = np.flatnonzero(~is_eval)
    first_trained = np.searchsorted(trained, starts[by_missing[: is_full.sum()]])
    is_eval[trained[first_trained]] = True


def assign_folds(rows: int, count: int, seed: int, strata: np.ndarray | None = None) -> np.ndarray:
    """Return the fold of each row, int64 (rows,), from 0 to `count` - 1. It depends on the seed
    alone. Folds differ by at most one row, also of each of the `strata`, int (rows,)."""
    order = _draw_order(rows, seed, _FOLD_STREAM, strata)
    folds = np.empty(rows, np.int64)
    folds[order] = np.arange(rows) % count
    return folds


def _draw_order(rows: int, seed: int, stream: int, strata: np.ndarray | None) -> np.ndarray:
    """Return 0 to rows - 1, int64, in an order drawn by (seed, stream), stratum after stratum."""
    order = draw_permutation(seed, stream, rows)
    return order if strata is None else order[np.argsort(strata[order], kind="stable")]
