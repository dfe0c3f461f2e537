"""Columns of an accuracy comparison, by the formulas of CANN's msaccucmp.

x is the left side, which is examined, and y the right side, the reference. Both are flattened, and
sums are in float64. `epsilon` is the float32 epsilon.

    cosine similarity             x.y / (|x| |y|), at most 1
    maximum absolute error        max |x - y|
    accumulated relative error    sum of |x/y - 1| over elements with |y| > epsilon
    relative Euclidean distance   |x - y| / |y|
    Kullback-Leibler divergence   sum of p log(p / q); p and q are x and y scaled to 0 to 1,
                                  at least epsilon, divided by their sums; infinite if an element
                                  of y is 0 and x's isn't
    standard deviation            mean and standard deviation of either side
    mean absolute error           mean of |x - y|
    root mean square error        root of the mean of (x - y)^2
    maximum, mean relative error  of |x/y - 1|, over elements with |y| > epsilon
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf, nan
from typing import NamedTuple

import numpy as np

EPSILON = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
"""Largest norm that is treated as 0."""


class MeanAndDeviation(NamedTuple):
    """Mean and standard deviation of a side, printed as `(mean;std)`."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"({self.mean:.6g};{self.std:.6g})"


_UNDEFINED = MeanAndDeviation(nan, nan)


@dataclass(frozen=True)
class Columns:
    """Columns of two tensors; only `left` and `right` for other shapes or non-finite elements."""

    cosine: float = nan
    """From -1 to 1; 1 if both sides are all 0, NaN if only one side is."""
    max_absolute: float = nan
    accumulated_relative: float = nan
    """Grows with the number of elements."""
    relative_euclidean: float = nan
    """0 if the right side is all 0."""
    divergence: float = nan
    """NaN if only one side is all 0, infinite if the right side alone has a 0 at an element."""
    left: MeanAndDeviation = _UNDEFINED
    right: MeanAndDeviation = _UNDEFINED
    mean_absolute: float = nan
    root_mean_square: float = nan
    max_relative: float = nan
    mean_relative: float = nan


def compare_arrays(left: np.ndarray, right: np.ndarray) -> Columns:
    """Return the columns of two arrays; only `left` and `right` if the rest isn't defined."""
    spreads = Columns(left=compute_spread(left), right=compute_spread(right))
    if left.shape != right.shape or left.size == 0:
        return spreads
    x, y = (np.asarray(side, np.float64).ravel() for side in (left, right))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return spreads
    difference = np.abs(x - y)
    is_nonzero = np.abs(y) > EPSILON
    relative = np.abs(x[is_nonzero] / y[is_nonzero] - 1)
    right_norm = compute_norm(y)
    return replace(
        spreads,
        cosine=compute_cosine(x, y),
        max_absolute=float(difference.max()),
        accumulated_relative=float(relative.sum()),
        relative_euclidean=0.0 if right_norm <= TINY else compute_norm(x - y) / right_norm,
        divergence=compute_divergence(x, y),
        mean_absolute=float(difference.mean()),
        root_mean_square=float(np.sqrt(np.square(difference).mean())),
        max_relative=float(relative.max(initial=0.0)),
        mean_relative=float(relative.mean()) if relative.size else 0.0,
    )


def compute_cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Return x.y / (|x| |y|): 1 for scalars and if both are all 0, NaN if only one is."""
    x_norm = compute_norm(x)
    y_norm = compute_norm(y)
    if x.size == 1 or max(x_norm, y_norm) <= TINY:
        return 1.0
    if min(x_norm, y_norm) <= TINY:
        return nan
    # Divided by one norm at a time: the product of two small norms may be 0.
    return float(np.clip((x / x_norm * (y / y_norm)).sum(), -1.0, 1.0))


def compute_divergence(x: np.ndarray, y: np.ndarray) -> float:
    """Return the divergence: NaN if only one is all 0, infinite if y alone is 0 at an element."""
    are_zero = [compute_norm(side) <= TINY for side in (x, y)]
    if all(are_zero):
        return 0.0
    if any(are_zero):
        return nan
    if ((y == 0) & (x != 0)).any():
        return inf
    p = _compute_distribution(x)
    q = _compute_distribution(y)
    divergence = float((p * np.log(p / q)).sum())
    return 0.0 if abs(divergence) < EPSILON else divergence


def _compute_distribution(x: np.ndarray) -> np.ndarray:
    """Scale an array to 0 to 1, raise it to at least epsilon, and divide it by its sum."""
    low = x.min()
    high = x.max()
    scaled = (x - low) / (high - low) if high > low else np.ones_like(x)
    raised: np.ndarray = np.maximum(scaled, EPSILON)
    return raised / raised.sum()


def compute_norm(x: np.ndarray) -> float:
    """Return the Euclidean norm of an array, summed in float64."""
    flat = np.asarray(x, np.float64).ravel()
    return float(np.sqrt(np.square(flat).sum()))


def compute_spread(x: np.ndarray) -> MeanAndDeviation:
    """Return mean and standard deviation of all elements; NaN for an empty array."""
    flat = np.asarray(x, np.float64).ravel()
    if not flat.size:
        return _UNDEFINED
    with np.errstate(invalid="ignore", over="ignore"):
        return MeanAndDeviation(float(flat.mean()), float(flat.std()))
