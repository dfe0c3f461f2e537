"""Fingerprints of data, which show whether two runs had the same samples."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.data.columns import BlankColumn, Column, Split
from pipeline.data.padding.buckets import PaddedColumn, RaggedArray, UniformColumn
from pipeline.data.text.windows import TokenWindows

SAMPLED = 32
"""Samples that are hashed of a column not in memory: decoding all would take minutes."""


@dataclass(frozen=True)
class Fingerprint:
    """The shape and type of a column, and the SHA-256 of its values, C order, little-endian.

    Where samples have several sizes, the sizes are hashed first, and no padding is; of windows the
    text that they are cut from.
    """

    shape: tuple[int, ...]
    dtype: str
    sha256: str
    of: str
    """Which values were hashed: all, evenly spread samples, or none, of which `sha256` is empty."""


def fingerprint(split: Split) -> Mapping[str, Fingerprint]:
    """Return the fingerprint of every column.

    A column in memory is hashed as a whole, about 1 ms a megabyte, and without padding. Of any
    other column `SAMPLED` samples are hashed. Raises DataError where one can't be read.
    """
    return {name: _of_column(column) for name, column in split.columns.items()}


def _of_column(column: Column) -> Fingerprint:
    samples, dtype = column.shape[0], np.dtype(column.dtype)
    if isinstance(column, BlankColumn):
        return Fingerprint(tuple(column.shape), dtype.name, sha256="", of="none")
    hashed, of = _arrays_of(column), "all"
    if hashed is None:
        rows = np.unique(np.linspace(0, samples - 1, SAMPLED).astype(np.int64))
        hashed, of = (column[rows],), f"{len(rows)} of {samples:,}"
    return Fingerprint(tuple(column.shape), dtype.name, _sha256(hashed), of)


def _arrays_of(column: Column) -> tuple[np.ndarray, ...] | None:
    """Return the arrays of a column in memory, sizes first; None where it is read on demand."""
    match column:
        case np.ndarray():
            return (column,)
        case RaggedArray(flat=flat, sizes=sizes):
            return sizes, flat
        case PaddedColumn(values=padded):
            return _arrays_of(padded)
        case UniformColumn(column=uniform):
            return _arrays_of(uniform)
        case TokenWindows(tokens=tokens):
            return (tokens,)
    return None


def _sha256(arrays: Sequence[np.ndarray]) -> str:
    digest = hashlib.sha256()
    for values in arrays:
        little = values.astype(values.dtype.newbyteorder("<"), copy=False)
        digest.update(np.ascontiguousarray(little).data)
    return digest.hexdigest()
