"""Histograms of arrays, as TensorBoard shows them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

BINS = 64
"""Bins of equal width, from the smallest to the largest value; TensorBoard shows 30 of them."""


@dataclass(frozen=True)
class Histogram:
    """Counts of values by bin, and their moments; values that are not finite are left out."""

    low: float
    high: float
    total: float
    squares: float
    """Sum of the squares."""
    limits: tuple[float, ...]
    """Upper ends of the bins."""
    counts: tuple[int, ...]
    left_out: int = 0
    """Values that are not finite."""

    @property
    def count(self) -> int:
        """Number of values."""
        return sum(self.counts)


def histogram_of(values: np.ndarray) -> Histogram | None:
    """Return the histogram of an array of floats of any shape; None where no value is finite."""
    # 16-bit types have no sums of their own, and squares of float32 may overflow it.
    flat = np.asarray(values).reshape(-1).astype(np.float64)
    finite = flat[np.isfinite(flat)]
    if not finite.size:
        return None
    try:
        counts, edges = np.histogram(finite, BINS)
    except ValueError:
        # Its values differ by so little that no 64 numbers lie between them.
        counts, edges = np.array([finite.size]), np.array([finite.min(), finite.max()])
    return Histogram(
        float(finite.min()),
        float(finite.max()),
        float(finite.sum()),
        float(finite @ finite),
        tuple(edges[1:].tolist()),
        tuple(counts.tolist()),
        int(flat.size - finite.size),
    )
