"""Sizes of elements in bytes, by JAX's names of types."""

from __future__ import annotations

import ml_dtypes  # noqa: F401  (registers bfloat16, float8 and int4 with numpy)
import numpy as np

KEY_BYTES = 8
"""Size of a random key, whose type is `key<...>`."""
MASK_BYTES = 1 / 8
"""Size of a bool in the memory of an Ascend, where it is one bit."""


def get_item_bytes(dtype: str) -> int:
    """Return the size of an element during a computation. Raises TypeError for an unknown type."""
    return KEY_BYTES if dtype.startswith("key") else np.dtype(dtype).itemsize


def get_stored_bytes(dtype: str) -> float:
    """Return the size of an element in device memory, in which masks are packed."""
    return MASK_BYTES if dtype == "bool" else get_item_bytes(dtype)
