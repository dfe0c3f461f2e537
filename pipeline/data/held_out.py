"""Samples that come as one lot, split into those to train on and those to evaluate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from pydantic import Field

Share = Annotated[float, Field(gt=0, lt=1)]
"""The share of the samples that are evaluated and not trained on."""

_STREAM = 1 << 62
"""Keys of these draws, clear of those of passes."""


def hold_out(
    groups: np.ndarray, names: Sequence[str], share: float, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows to train on and rows to evaluate, int64, each in ascending order.

    `groups` are the classes of the samples, int (n,), and `names` those of the classes. Of each
    class the nearest number to its share is evaluated, but at least one, and at least one is
    trained on. The rows are a pure function of the seed, and those of a class do not depend on
    other classes. Raises ValueError that names a class with one sample.
    """
    evaluated = []
    for group in np.unique(groups).tolist():
        rows = np.flatnonzero(groups == group)
        if len(rows) < 2:
            raise ValueError(f"{names[group]} has 1 sample; a split needs at least 2 of each class")
        count = min(max(int(share * len(rows) + 0.5), 1), len(rows) - 1)
        key = np.array([seed, _STREAM + group], np.uint64)
        drawn = np.argsort(np.random.Philox(key=key).random_raw(len(rows)), kind="stable")
        evaluated.append(rows[drawn[:count]])
    chosen = np.zeros(len(groups), bool)
    chosen[np.concatenate(evaluated)] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
