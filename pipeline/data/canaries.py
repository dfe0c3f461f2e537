"""Canaries: training samples with wrong labels. Their losses are used to audit a private run."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.data.columns import RawData
from pipeline.data.order import draw_words, permute

_CHOICE_STREAM = 7 << 61
"""Number in the key of the choice of canaries, so that no other draw has the same key."""
_LABEL_STREAM = _CHOICE_STREAM + 1
"""Number in the key of the labels of canaries, so that no other draw has the same key."""


def choose_canaries(samples: int, count: int, seed: int) -> np.ndarray:
    """Return the indices of `count` canaries among the training samples, int64 (count,). Anyone who
    has the recipe's seed can compute them. Which canaries a private run trains on is drawn later,
    with a secret key. Raises ValueError for more than half of the samples."""
    if count > samples // 2:
        raise ValueError(f"{count:,} canaries: must be at most half of {samples:,} samples")
    return permute(np.arange(count), samples, seed, _CHOICE_STREAM)


def plant_canaries(raw: RawData, canaries: np.ndarray, seed: int) -> RawData:
    """Return the data with a random wrong label for each canary, int (n,). Raises ValueError unless
    each sample has one of at least two classes."""
    labels = raw.train.columns["label"]
    classes = len(raw.targets)
    if raw.targets.task != "classification" or len(labels.shape) != 1 or classes < 2:
        raise ValueError("must be null unless each sample has one of several classes")
    new_labels = np.array(labels[:])
    words = draw_words(seed, _LABEL_STREAM, len(canaries))
    # Adding 1 to classes - 1, modulo classes, always results in another class.
    shifts = 1 + (words % np.uint64(classes - 1)).astype(np.int64)
    new_labels[canaries] = (new_labels[canaries] + shifts) % classes
    split = replace(raw.train, columns={**raw.train.columns, "label": new_labels})
    return raw.with_split("train", split)
