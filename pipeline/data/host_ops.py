"""Host ops: functions in Python that map single values while they are read."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.core.errors import DataError, PipelineError
from pipeline.core.registry import Spec
from pipeline.data.columns import (
    Column,
    ColumnSpec,
    LazyColumn,
    Split,
    describe_column,
    name_sample,
    read_sample,
)
from pipeline.data.padding.buckets import RaggedColumn
from pipeline.data.random import seed_words, uniforms

HOST_OP = 1 << 29
"""Number of the first host op in the keys of random draws, larger than the index of any map op."""


class HostOp(Spec):
    """Base of the ops that map one value at a time, in any Python code, before the map ops.

    Several threads call an op at once, so it must not change its fields. It takes its random
    numbers as `uniforms`, float32 (draws,) in [0, 1), which are a pure function of (seed, epoch,
    sample, op).
    """

    name: str
    column: str

    @property
    def draws(self) -> int:
        """The number of random numbers per sample."""
        return 0

    def output(self, value: ColumnSpec) -> ColumnSpec:
        """Return the spec of a mapped value. Raises ValueError if the op can't be applied to it."""
        return value

    @abstractmethod
    def __call__(self, value: np.ndarray, uniforms: np.ndarray) -> np.ndarray:
        """Return one mapped value, in the dtype and shape of `output`."""


@dataclass(frozen=True)
class HostMappedColumn(LazyColumn):
    """A column whose values a host op maps as they are read."""

    column: Column
    op: HostOp
    place: str
    """The op's position and name, for messages."""
    seed: np.ndarray
    """uint32 (2,), from `seed_words`."""
    number: int
    """The op's number in the keys of random draws."""
    spec: ColumnSpec
    """Shape and dtype of a mapped value."""

    @property
    def draws(self) -> int:
        """The number of random numbers for a sample, of this op and of those before it."""
        return self.op.draws + getattr(self.column, "draws", 0)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self.column.shape[0], *self.spec.shape)

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.spec.dtype)

    def sample(self, index: int) -> np.ndarray:
        """Return the mapped value of epoch 0."""
        return self.sample_at(index, index, 0)

    def sample_at(self, index: int, key: int, epoch: int) -> np.ndarray:
        """Return the mapped value of a sample, with the random numbers of (key, epoch). Raises
        DataError with op and sample if the op fails, or returns another shape or dtype."""
        if isinstance(self.column, HostMappedColumn):
            value = self.column.sample_at(index, key, epoch)
        else:
            value = read_sample(self.column, index)
        draws = uniforms(np, self.seed, epoch, np.array([key]), self.number, self.op.draws)[0]
        try:
            mapped = np.asarray(self.op(value, draws))
        except PipelineError:
            raise
        except Exception as error:
            raise DataError(
                f"{self.place}: {self.sample_name(index)}: {type(error).__name__}: {error}"
            ) from error
        if mapped.shape != self.spec.shape or mapped.dtype != self.dtype:
            raise DataError(
                f"{self.place}: {self.sample_name(index)}: returned {mapped.dtype} of shape "
                f"{mapped.shape}; its output is {self.dtype} of shape {self.spec.shape}"
            )
        return mapped

    def sample_name(self, index: int) -> str:
        return name_sample(self.column, index)


def _compute_spec(place: str, op: HostOp, specs: Mapping[str, ColumnSpec]) -> ColumnSpec:
    """Return the spec of what an op maps, from the specs of all columns. Raises ValueError,
    beginning with `place`, if the op can't be applied."""
    if op.column not in specs:
        raise ValueError(f"{place}: column = {op.column}: there is no such column")
    try:
        return op.output(specs[op.column])
    except ValueError as error:
        raise ValueError(f"{place}: {error}") from error


def compute_host_specs(
    ops: Sequence[HostOp], specs: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the specs of all columns after the ops. Raises ValueError, beginning with the op's
    position, for an op that can't be applied."""
    result = dict(specs)
    for place, op in _number_ops(ops):
        result[op.column] = _compute_spec(place, op, result)
    return result


def _number_ops(ops: Sequence[HostOp]) -> list[tuple[str, HostOp]]:
    """Return each op with its position and name, for messages."""
    return [(f"host_ops.{position} ({op.name})", op) for position, op in enumerate(ops)]


def map_on_host(split: Split, ops: Sequence[HostOp], seed: int) -> Split:
    """Return the split with columns that `ops` map as they are read. Raises ValueError, beginning
    with the op's position, for an op that can't be applied."""
    columns = dict(split.columns)
    for position, (place, op) in enumerate(_number_ops(ops)):
        column = columns.get(op.column)
        if isinstance(column, RaggedColumn):
            raise ValueError(f"{place}: column = {op.column}: its values differ in size")
        specs = {} if column is None else {op.column: describe_column(column)}
        spec = _compute_spec(place, op, specs)
        columns[op.column] = HostMappedColumn(
            columns[op.column], op, place, seed_words(seed), HOST_OP + position, spec
        )
    return replace(split, columns=columns)


def read_epoch_values(column: Column, rows: np.ndarray, keys: np.ndarray, epoch: int) -> np.ndarray:
    """Return the values at `rows`, int (n,), with the random numbers of host ops in an epoch.
    `keys`, int (n,), are the samples' numbers in the keys of random draws."""
    if not isinstance(column, HostMappedColumn):
        return column[rows]
    values = np.empty((len(rows), *column.shape[1:]), column.dtype)
    for position, (row, key) in enumerate(zip(rows.tolist(), keys.tolist(), strict=True)):
        values[position] = column.sample_at(row, key, epoch)
    return values
