"""Named arrays as a weight file holds them, and the bounds that every reader keeps to."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import ml_dtypes
import numpy as np

from pipeline.files.error_text import shown
from pipeline.files.npy import MAX_ENTRIES, array_bytes

Arrays = dict[str, np.ndarray]
"""Name -> array, in the order of the file."""

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)

MAX_NAME_LENGTH = 1024


def decode(
    name: str, dtype: np.dtype, shape: Sequence[int], data: bytes | memoryview
) -> np.ndarray:
    """The array that `data` holds, row by row.

    Raises ValueError where the shape is none, or needs more or fewer bytes than there are.
    """
    needed = array_bytes(name, dtype, shape)
    if len(data) != needed:
        raise ValueError(
            f"{shown(name)} has shape {tuple(shape)} of {dtype}, {needed:,} bytes; "
            f"the file has {len(data):,}"
        )
    return np.frombuffer(data, dtype).reshape(shape)


def add(arrays: Arrays, name: object, array: np.ndarray) -> None:
    """Add an entry. Raises ValueError where the name is none, there already, or one too many."""
    if not isinstance(name, str) or not name or len(name) > MAX_NAME_LENGTH:
        raise ValueError(f"an entry has no name of 1 to {MAX_NAME_LENGTH} characters")
    if name in arrays:
        raise ValueError(f"two entries are called {shown(name)}")
    if len(arrays) == MAX_ENTRIES:
        raise ValueError(f"it has more than {MAX_ENTRIES:,} entries")
    arrays[name] = array


def natural_key(name: str) -> list[str | int]:
    """What sorts names with the numbers in them as numbers: texts and numbers by turns.

    `features.10` comes behind `features.2`.
    """
    parts = re.split(r"([0-9]+)", name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)]


def total_bytes(arrays: Mapping[str, np.ndarray]) -> int:
    """What all arrays take together."""
    return sum(array.nbytes for array in arrays.values())
