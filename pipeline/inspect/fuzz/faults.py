"""Faults of weights (flipped bits, zeros, changed signs), and the accuracy that they leave.

Faults are a pure function of (seed, kind, trial). A larger number of faults in a trial includes the
faults of a smaller number.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from pipeline.data.order import draw_words, permute

KINDS = ("bit flips", "zeros", "sign flips")
TRIALS = 5
STREAM = 3 << 61
"""Number of the first draw of faults; no epoch has this number."""


@dataclass(frozen=True)
class FaultRow:
    """The accuracy with a number of faults."""

    fault: str
    count: int
    accuracy: float
    """Mean over TRIALS draws."""
    least: float
    """Least accuracy of the draws."""


def list_counts(weights: int) -> list[int]:
    """Return the numbers of faults: powers of ten, up to the number of weights."""
    return [10**power for power in range(10) if 10**power <= weights]


def inject_faults(params: Any, fault: str, count: int, seed: int, trial: int) -> Any:
    """Return float32 parameters with `count` faults in different weights; `params` don't change."""
    leaves, structure = jax.tree.flatten(params)
    copies = [np.array(leaf, np.float32) for leaf in leaves]
    ends = np.cumsum([copy.size for copy in copies])
    number = STREAM + KINDS.index(fault) * TRIALS + trial
    places = permute(np.arange(count), int(ends[-1]), seed, number)
    bits = draw_words(seed, STREAM + (1 << 20) + trial, count) % np.uint64(32)
    leaf_numbers = np.searchsorted(ends, places, side="right")
    for leaf_number in np.unique(leaf_numbers).tolist():
        flat = copies[leaf_number].reshape(-1)
        is_inside = leaf_numbers == leaf_number
        rows = places[is_inside] - (ends[leaf_number] - flat.size)
        match fault:
            case "bit flips":
                masks = np.uint32(1) << bits[is_inside].astype(np.uint32)
                flat.view(np.uint32)[rows] ^= masks
            case "zeros":
                flat[rows] = 0
            case "sign flips":
                flat[rows] = -flat[rows]
    return jax.tree.unflatten(structure, copies)


def measure_faults(
    params: Any, compute_accuracy: Callable[[Any], float], seed: int
) -> Iterator[FaultRow]:
    """Yield the accuracy of parameters for each kind and number of faults."""
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    for fault in KINDS:
        for count in list_counts(weights):
            accuracies = [
                compute_accuracy(inject_faults(params, fault, count, seed, trial))
                for trial in range(TRIALS)
            ]
            yield FaultRow(fault, count, float(np.mean(accuracies)), min(accuracies))


def count_right(logits: np.ndarray, labels: Sequence[int] | np.ndarray) -> int:
    """Return how many predictions are right. Logits that aren't finite are wrong."""
    is_finite = np.isfinite(logits).all(axis=1)
    return int((is_finite & (np.nan_to_num(logits).argmax(axis=1) == np.asarray(labels))).sum())
