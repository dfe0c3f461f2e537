"""Splits of one collection of samples into training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

Share = Annotated[float, Field(gt=0, lt=1)]
"""The share of the samples to evaluate and not to train on."""

_STREAM = 1 << 62
"""Keys of these draws, different from the keys of epochs."""


def hold_out(
    groups: np.ndarray, names: Sequence[str], share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows to train on and rows to evaluate, int64, each in ascending order.

    `groups` are the classes of the samples, int (n,), and `names` the names of the classes. Of each
    class the nearest number to its share is evaluated, at least one, and at least one is trained
    on. The rows are a pure function of the seed, and do not depend on other classes. Raises
    ValueError that names a class with one sample.
    """
    evaluated = []
    for group in np.unique(groups).tolist():
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise ValueError(f"{names[group]} has 1 sample; a split needs at least 2 of each class")
        count = min(max(int(share * len(rows) + 0.5), 1), len(rows) - 1)
        key = np.array([seed, _STREAM + group], np.uint64)
        order = np.argsort(np.random.Philox(key=key).random_raw(len(rows)), kind="stable")
        evaluated.append(rows[order[:count]])
    is_eval = np.zeros(len(groups), bool)
    is_eval[np.concatenate(evaluated)] = True
    return np.flatnonzero(~is_eval), np.flatnonzero(is_eval)


def split_rows(
    rows: int, share: float, seed: int, strata: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows for training and for evaluation, int64, each in the order of the file.

    `share` of them is for evaluation, rounded down. They are drawn by the seed alone; with
    `strata`, integers (rows,), each stratum has its share to within one row, and its first row
    drawn is for training. Only raw Philox words are used, the stream that numpy promises stable.
    """
    order = np.argsort(np.random.Philox(key=np.uint64(seed)).random_raw(rows), kind="stable")
    if strata is not None:
        order = order[np.argsort(strata[order], kind="stable")]
    # One of every 1 / share rows of this order, so each stratum has its share.
    is_eval = np.floor(np.arange(1, rows + 1) * share) > np.floor(np.arange(rows) * share)
    if strata is not None:
        ordered = strata[order]
        first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
        is_eval[first] = False
    return np.sort(order[~is_eval]), np.sort(order[is_eval])
