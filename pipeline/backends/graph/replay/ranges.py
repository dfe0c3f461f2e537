"""Ranges of tensors, and the samples with non-finite values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Range:
    """Statistics of a tensor's finite values (None without any), and numbers of NaN and Inf."""

    dtype: str
    shape: tuple[int, ...]
    min: float | None
    max: float | None
    mean: float | None
    nan: int
    inf: int

    def __str__(self) -> str:
        counts = [
            f"{count:,} {name}" for name, count in (("NaN", self.nan), ("Inf", self.inf)) if count
        ]
        text = f"{self.dtype} {'x'.join(map(str, self.shape)) or 'scalar'}"
        if counts:
            text += f" with {' and '.join(counts)}"
        if self.min is None:
            return text
        lead = ", else" if counts else ","
        if self.shape == ():
            return f"{text}{lead} {self.min:.4g}"
        return f"{text}{lead} {self.min:.4g} to {self.max:.4g}, mean {self.mean:.4g}"


def find_range(array: Any) -> Range:
    values = np.asarray(array)
    dtype = str(values.dtype)
    shape = tuple(values.shape)
    wide = values.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    nan = int(np.isnan(wide).sum())
    inf = wide.size - nan - finite.size
    if not finite.size:
        return Range(dtype, shape, None, None, None, nan, inf)
    low = float(finite.min())
    high = float(finite.max())
    return Range(dtype, shape, low, high, float(finite.mean()), nan, inf)


def is_float(array: Any) -> bool:
    """Return whether a tensor can hold NaN or infinity, unlike random keys and integers."""
    return jnp.issubdtype(array.dtype, jnp.inexact)


def find_largest_magnitude(array: Any) -> float:
    """Return the greatest magnitude in an array; NaN if the array has a NaN, 0 if it is empty."""
    values = np.asarray(array)
    if not values.size:
        return 0.0
    # `min` and `max` make no copy of the array, unlike `abs` or `isfinite`.
    with np.errstate(all="ignore"):
        return float(np.maximum(abs(float(values.min())), abs(float(values.max()))))


def find_non_finite(array: Any, batch_size: int, *, last: bool = False) -> tuple[int, ...] | None:
    """Return the samples of a batch that have a non-finite value in an array.

    The first axis is the batch, or the batch times another size; with `last`, the last axis is
    another size times the batch. Returns None if the axis isn't a multiple of the batch size.
    """
    values = np.asarray(array)
    if not values.ndim or not values.size or values.shape[-1 if last else 0] % batch_size:
        return None
    shape = (-1, batch_size) if last else (batch_size, -1)
    rows = ~np.isfinite(values).reshape(shape).all(axis=0 if last else 1)
    return tuple(np.flatnonzero(rows).tolist())
