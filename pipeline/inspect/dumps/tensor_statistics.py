"""Statistics of a tensor, for dumps that hold no arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

STATISTICS = ("min", "max", "mean", "std", "norm", "zeros", "not_finite")
"""The smallest, the largest, the mean, the standard deviation and the Euclidean norm of the finite
elements; the share of zeros, and the number of elements that are not finite."""


def statistics_of(array: np.ndarray) -> dict[str, float | int]:
    """Return the `STATISTICS` of an array by name, summed in float64; NaN where all is missing."""
    values = np.asarray(array, np.float64).ravel()
    finite = values[np.isfinite(values)]
    result: dict[str, float | int] = dict.fromkeys(STATISTICS[:5], float("nan"))
    if finite.size:
        figures: tuple[Any, ...] = (
            finite.min(),
            finite.max(),
            finite.mean(),
            finite.std(),
            np.sqrt(np.square(finite).sum()),
        )
        result |= dict(zip(STATISTICS[:5], map(float, figures), strict=True))
    share = float(np.mean(values == 0)) if values.size else float("nan")
    return result | {"zeros": share, "not_finite": int(values.size - finite.size)}
