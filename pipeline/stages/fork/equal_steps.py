"""Steps that two recipes have in common: those before the first that a key changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.core.files.tree_diff import Difference
from pipeline.stages.record.recorded_recipe import LENGTH

SCHEDULE = ("train", "schedule")
RATE_PATHS = (*LENGTH, ("train", "planned_for"), SCHEDULE)
"""Keys that decide a step only by the table of learning rates."""


@dataclass(frozen=True, eq=False)
class RateTable:
    """The learning rates of the updates of a run. A step has at most one update, also in several
    microbatches."""

    rates: np.ndarray
    """float32 (updates,), or (updates, columns)."""
    total: int
    """Steps of the run."""


def changes_only_rates(change: Difference) -> bool:
    """Return whether a key decides steps only by the table of learning rates."""
    return any(change.path[: len(path)] == path for path in RATE_PATHS)


def count_equal_steps(left: RateTable, right: RateTable) -> int:
    """Return the number of steps with the same learning rates from the start."""
    total = min(left.total, right.total)
    if left.rates.shape[1:] != right.rates.shape[1:]:
        return 0
    length = min(len(left.rates), len(right.rates))
    differs = left.rates[:length] != right.rates[:length]
    rows = np.flatnonzero(differs.any(axis=1) if differs.ndim > 1 else differs)
    if not len(rows):
        return total
    return min(total, int(rows[0]))


def list_earlier_changes(
    changes: Sequence[Difference], left: RateTable, right: RateTable, step: int
) -> list[Difference]:
    """Return the changes that would have changed steps up to `step`.

    `changes` are keys that a resumed run can't change, and keys of the length.
    """
    if step == 0:
        return []
    has_equal_rates = count_equal_steps(left, right) >= step
    return [change for change in changes if not (has_equal_rates and changes_only_rates(change))]
