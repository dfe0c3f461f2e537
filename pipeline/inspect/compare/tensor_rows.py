"""Rows of an accuracy comparison: pairs of tensors, and their columns."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import isinf, isnan

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.core.files.csv_file import format_line
from pipeline.core.files.name_text import find_nearest, show_name
from pipeline.core.files.value_text import align_columns
from pipeline.inspect.compare.accuracy_columns import Columns, compare_arrays
from pipeline.inspect.dumps.tensor_names import DATA, LOSS, TensorName

NO_COUNTERPART = "*"
"""Cell for an operator that one side lacks."""
HEADER = (
    *("Index", "LeftOp", "RightOp", "TensorIndex", "CosineSimilarity", "MaxAbsoluteError"),
    *("AccumulatedRelativeError", "RelativeEuclideanDistance", "KullbackLeiblerDivergence"),
    *("StandardDeviation", "MeanAbsoluteError", "RootMeanSquareError"),
    *("MaxRelativeError", "MeanRelativeError"),
)
Mapped = Mapping[str, Sequence[str]]
"""The right side's layers that correspond to each layer of the left side, by path."""
Read = Callable[[TensorName], "np.ndarray | None"]
"""Reads a tensor; None if its side has only statistics."""


@dataclass(frozen=True)
class TensorSide:
    """The tensors of one side of a comparison, in the order of the forward pass."""

    name: str
    about: str
    layers: Mapping[str, str]
    """Kinds of layers by path."""
    names: Sequence[TensorName]
    read: Read
    warning: str | None = None


@dataclass(frozen=True)
class Thresholds:
    """Limits beyond which a row is marked."""

    cosine: float = 0.99
    """Lower limit, from 0 to 1."""
    max_absolute: float = 5.0
    """Upper limit, from 1 to 5."""
    relative_euclidean: float = 0.10
    """Upper limit, from 0 to 1."""

    def are_exceeded(self, columns: Columns) -> bool:
        """Whether a column of a row is beyond its limit; NaN isn't."""
        return (
            columns.cosine < self.cosine
            or columns.max_absolute > self.max_absolute
            or columns.relative_euclidean > self.relative_euclidean
        )


@dataclass(frozen=True)
class TensorRow:
    """A pair of tensors with its columns; a missing side is None."""

    index: int
    left: TensorName | None
    right: TensorName | None
    columns: Columns = field(default_factory=Columns)
    dtypes: tuple[str, ...] = ()
    """Types of the left and right tensor, if both were read."""

    @property
    def cells(self) -> tuple[str, ...]:
        """The cells under `HEADER`."""
        c = self.columns
        name = self.left or self.right
        assert name is not None, "a row has a tensor"
        return (
            str(self.index),
            NO_COUNTERPART if self.left is None else self.left.layer,
            NO_COUNTERPART if self.right is None else self.right.layer,
            name.tensor_index,
            *map(_format_number, (c.cosine, c.max_absolute, c.accumulated_relative)),
            *map(_format_number, (c.relative_euclidean, c.divergence)),
            f"{c.left},{c.right}",
            *map(_format_number, (c.mean_absolute, c.root_mean_square)),
            *map(_format_number, (c.max_relative, c.mean_relative)),
        )


def _format_number(value: float) -> str:
    return "NaN" if isnan(value) else "Inf" if isinf(value) else f"{value:.6g}"


def pair_names(
    left: Iterable[TensorName], right: Iterable[TensorName], mapped: Mapped
) -> list[tuple[TensorName | None, TensorName | None]]:
    """Pair tensors by name or by `mapped`, in the order of `left`; a missing side is None."""
    right_names = dict.fromkeys(right)
    pairs = list[tuple[TensorName | None, TensorName | None]]()
    used = set()
    for name in left:
        layers = mapped.get(name.layer, (name.layer,))
        matches = [TensorName(layer, name.role, name.index) for layer in layers]
        matches = [match for match in matches if match in right_names]
        used.update(matches)
        pairs += [(name, match) for match in matches] or [(name, None)]
    pairs += [(None, name) for name in right_names if name not in used]
    return pairs


def require_mapped(mapped: Mapped, left: Collection[str], right: Collection[str]) -> None:
    """Raise RecipeError for layers in `mapped` that their side lacks, with similar names."""
    sides = {"left": (left, mapped), "right": (right, chain.from_iterable(mapped.values()))}
    problems = []
    for side, (layers, names) in sides.items():
        for name in names:
            if name in layers or name in (DATA, LOSS):
                continue
            guess = find_nearest(name, layers)
            hint = f"; did you mean {guess}?" if guess else ""
            problems.append(f"--map: the {side} side has no layer {show_name(name)}{hint}")
    if problems:
        raise RecipeError(problems)


def compare_tensors(
    left: Sequence[TensorName],
    right: Sequence[TensorName],
    read_left: Read,
    read_right: Read,
    mapped: Mapped,
) -> list[TensorRow]:
    """Return a row for every pair; tensors are read one pair at a time."""
    rows = []
    for index, (left_name, right_name) in enumerate(pair_names(left, right, mapped)):
        row = TensorRow(index, left_name, right_name)
        if left_name is not None and right_name is not None:
            left_array = read_left(left_name)
            right_array = read_right(right_name)
            if left_array is not None and right_array is not None:
                dtypes = (str(left_array.dtype), str(right_array.dtype))
                row = replace(row, columns=compare_arrays(left_array, right_array), dtypes=dtypes)
        rows.append(row)
    return rows


def to_csv(rows: Sequence[TensorRow]) -> str:
    return "".join([format_line(HEADER), *(format_line(row.cells) for row in rows)])


def format_rows(rows: Sequence[TensorRow], thresholds: Thresholds) -> list[str]:
    """Return the rows as lines of a table; a row beyond a threshold is marked with `!`."""
    table = [HEADER[:10], *(row.cells[:10] for row in rows)]
    marks = [" ", *("!" if thresholds.are_exceeded(row.columns) else " " for row in rows)]
    lines = zip(marks, align_columns(table, right=(0, *range(4, 10))), strict=True)
    return [f"{mark} {line}".rstrip() for mark, line in lines]
