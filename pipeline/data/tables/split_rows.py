"""The split of a table into training and evaluation rows."""

from __future__ import annotations

import numpy as np


def split_rows(
    rows: int, share: float, seed: int, strata: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The rows for training and for evaluation, int64, each in the order of the file.

    `share` of them is for evaluation, rounded down. They are drawn by the seed alone; with
    `strata`, integers (rows,), each stratum gives its share to within one row, and its first row
    drawn is for training. Only raw Philox words are used, the stream that numpy keeps stable.
    """
    drawn = np.argsort(np.random.Philox(key=np.uint64(seed)).random_raw(rows), kind="stable")
    if strata is not None:
        drawn = drawn[np.argsort(strata[drawn], kind="stable")]
    # Every 1 / share rows of this order one is taken, so of each stratum as many.
    taken = np.floor(np.arange(1, rows + 1) * share) > np.floor(np.arange(rows) * share)
    if strata is not None:
        ordered = strata[drawn]
        first = np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))
        taken[first] = False
    return np.sort(drawn[~taken]), np.sort(drawn[taken])
