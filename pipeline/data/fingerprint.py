"""Fingerprints of data: what says whether two runs were given the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from pipeline.data.columns import Column, Split

SAMPLED = 32
"""So many samples of a column are read that is not in memory: decoding all would take minutes."""


@dataclass(frozen=True)
class Fingerprint:
    """The shape and type of a column, and the SHA-256 of its values, C order, little-endian."""

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    of: str
    """Which values: all of them, or samples that lie evenly spread."""


def fingerprint(split: Split) -> Mapping[str, Fingerprint]:
    """The fingerprint of every column.

    A column in memory is hashed as a whole, some 1 ms a megabyte at most; of any other, its shape
    and `SAMPLED` samples. Raises DataError where one of these can't be read.
    """
    return {name: _of_column(column) for name, column in split.columns.items()}


def _of_column(column: Column) -> Fingerprint:
    samples, dtype = column.shape[0], np.dtype(column.dtype)
    if isinstance(column, np.ndarray):
        values, of = column, "all"
    else:
        rows = np.unique(np.linspace(0, samples - 1, SAMPLED).astype(np.int64))
        values, of = column[rows], f"{len(rows)} of {samples:,}"
    return Fingerprint(tuple(column.shape), dtype.name, _sha256(values), of)


def _sha256(values: np.ndarray) -> str:
    little = values.astype(values.dtype.newbyteorder("<"), copy=False)
    return hashlib.sha256(np.ascontiguousarray(little).data).hexdigest()
