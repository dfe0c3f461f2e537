"""Named arrays of a weight file, and checks that all readers of such files share."""

from __future__ import annotations

import re
from collections.abc import Sequence

import ml_dtypes
import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import MAX_ENTRIES, count_array_bytes

Arrays = dict[str, np.ndarray]
"""Arrays by name, in the order of the file."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

MAX_NAME_LENGTH = 1024


def decode_array(
    name: str, dtype: np.dtype, shape: Sequence[int], data: bytes | memoryview
) -> np.ndarray:
    """Return the array in `data`. Raises ValueError if `data` doesn't have the array's size."""
    num_bytes = count_array_bytes(name, dtype, shape)
    if len(data) != num_bytes:
        raise ValueError(
            f"{show_name(name)} has shape {tuple(shape)} of {dtype}, {num_bytes:,} bytes; "
            f"the file has {len(data):,}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def add_array(arrays: Arrays, name: object, array: np.ndarray) -> None:
    """Add an array. Raises ValueError for an invalid or duplicate name, or too many arrays."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"an entry has no name of 1 to {MAX_NAME_LENGTH} characters")
    if name in arrays:
        raise ValueError(f"two entries are called {show_name(name)}")
    if len(arrays) == MAX_ENTRIES:
        raise ValueError(f"it has more than {MAX_ENTRIES:,} entries")
    arrays[name] = array


def make_natural_key(name: str) -> list[str | int]:
    """Return a sort key that compares numbers as numbers: `features.10` after `features.2`."""
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if position % 2 else part for position, part in enumerate(parts)]
