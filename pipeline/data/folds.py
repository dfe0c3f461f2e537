"""The recipe's section `dataset.folds`: one fold is evaluated, the others are trained on."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Self

import numpy as np
from pydantic import Field, NonNegativeInt, model_validator

from pipeline.core.registry import Spec
from pipeline.data.columns import RawData
from pipeline.data.random import MAX_SEED


class FoldsSpec(Spec):
    """Folds of the training split, one of which replaces the evaluation split."""

    count: Annotated[int, Field(ge=2)] = 5
    """Number of folds. They differ by at most one sample, and by at most one of each class."""
    index: NonNegativeInt = 0
    """The fold that is evaluated."""
    seed: Annotated[NonNegativeInt, Field(le=MAX_SEED)] = 0
    """The seed that assigns samples to folds, which don't depend on the recipe's seed."""

    @model_validator(mode="after")
    def _require_fold(self) -> Self:
        if self.index >= self.count:
            raise ValueError(f"index = {self.index}: must be 0 to {self.count - 1}")
        return self


def find_folds(raw: RawData, folds: FoldsSpec, ignore_index: int | None = None) -> np.ndarray:
    """Return the fold of each training sample, int64 (n,). If each sample has one class, each class
    is spread evenly over the folds, and samples with `ignore_index` too, which may be few. Raises
    ValueError if there are fewer samples than folds, in the split or in a class."""
    from pipeline.data.held_out import assign_folds

    labels = raw.train.columns["label"]
    samples = len(raw.train)
    if samples < folds.count:
        raise ValueError(
            f"count = {folds.count}: must be at most {samples:,}, the number of samples"
        )
    if raw.targets.task != "classification" or len(labels.shape) != 1:
        return assign_folds(samples, folds.count, folds.seed)
    classes = np.asarray(labels[:])
    counted = classes if ignore_index is None else classes[classes != ignore_index]
    class_ids, counts = np.unique(counted, return_counts=True)
    if counts.size and counts.min() < folds.count:
        name = raw.classes[int(class_ids[counts.argmin()])]
        raise ValueError(
            f"count = {folds.count}: must be at most {counts.min()}, the training samples of "
            f"class {name!r:.60}"
        )
    return assign_folds(samples, folds.count, folds.seed, classes)


def take_fold(raw: RawData, folds: FoldsSpec, ignore_index: int | None = None) -> RawData:
    """Return the data with fold `folds.index` of the training split as the evaluation split. The
    training split is the other folds, in order. Raises ValueError as `find_folds` does."""
    from pipeline.data.row_views import select_samples

    is_evaluated = find_folds(raw, folds, ignore_index) == folds.index
    train = select_samples(raw.train, np.flatnonzero(~is_evaluated))
    evaluated = select_samples(raw.train, np.flatnonzero(is_evaluated))
    # The splits are padded to the largest of all folds, so that runs of all folds share a program.
    smallest_fold = len(raw.train) // folds.count
    most_evaluated = -(-len(raw.train) // folds.count)
    most_trained = len(raw.train) - smallest_fold
    note = f"fold {folds.index} of {folds.count} is evaluated instead of the evaluation split"
    return replace(
        raw,
        train=replace(train, padding=most_trained - len(train)),
        eval=replace(evaluated, padding=most_evaluated - len(evaluated)),
        targets=replace(raw.targets, naive_mae=None),
        notes=(*raw.notes, note),
    )
