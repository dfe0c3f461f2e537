"""Arrays in memory that XLA uses in place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

ALIGNMENT_BYTES = 64
"""XLA uses a host buffer that starts at a multiple of this in place, and copies any other."""


def aligned_zeros(shape: Sequence[int], dtype: Any) -> np.ndarray:
    """Zeros that a CPU device uses without a copy."""
    dtype = np.dtype(dtype)
    size = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    raw = np.zeros(size + ALIGNMENT_BYTES, np.uint8)
    first = -raw.ctypes.data % ALIGNMENT_BYTES
    return raw[first : first + size].view(dtype).reshape(shape)
