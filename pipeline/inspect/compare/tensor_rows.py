"""Rows of an accuracy comparison: pairs of tensors, their columns, and their page.

The page is a table whose rows are marked by thresholds that the reader moves.

Columns have the formulas of CANN's msaccucmp. x is the left side, which is examined, and y the
right side, the reference. Both are flattened, and sums are in float64. `epsilon` is the float32
epsilon.

    cosine similarity             x.y / (|x| |y|), at most 1
    maximum absolute error        max |x - y|
    accumulated relative error    sum of |x/y - 1| over elements with |y| > epsilon
    relative Euclidean distance   |x - y| / |y|
    Kullback-Leibler divergence   sum of p log(p / q); p and q are x and y scaled to 0 to 1,
                                  at least epsilon, divided by their sums; infinite if an element
                                  of y is 0 and x's isn't
    standard deviation            mean and standard deviation of either side
    mean absolute error           mean of |x - y|
    root mean square error        root of the mean of (x - y)^2
    maximum, mean relative error  of |x/y - 1|, over elements with |y| > epsilon
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from math import inf, isinf, isnan, nan
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.csv_file import format_line
from pipeline.core.files.name_text import find_nearest, show_name
from pipeline.core.files.value_text import align_columns
from pipeline.core.pages.page import Page, render_page
from pipeline.inspect.dumps.dump_files import DATA, LOSS, TensorName

EPSILON = float(np.finfo(np.float32).eps)
TINY = float(np.finfo(np.float32).tiny)
"""Largest norm that is treated as 0."""
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


class MeanAndDeviation(NamedTuple):
    """Mean and standard deviation of a side, printed as `(mean;std)`."""

    mean: float
    std: float

    def __str__(self) -> str:
        return f"({self.mean:.6g};{self.std:.6g})"


_UNDEFINED = MeanAndDeviation(nan, nan)


@dataclass(frozen=True)
class Columns:
    """Columns of two tensors; only `left` and `right` for other shapes or non-finite elements."""

    cosine: float = nan
    """From -1 to 1; 1 if both sides are all 0, NaN if only one side is."""
    max_absolute: float = nan
    accumulated_relative: float = nan
    """Grows with the number of elements."""
    relative_euclidean: float = nan
    """0 if the right side is all 0."""
    divergence: float = nan
    """NaN if only one side is all 0, infinite if the right side alone has a 0 at an element."""
    left: MeanAndDeviation = _UNDEFINED
    right: MeanAndDeviation = _UNDEFINED
    mean_absolute: float = nan
    root_mean_square: float = nan
    max_relative: float = nan
    mean_relative: float = nan


def compare_arrays(left: np.ndarray, right: np.ndarray) -> Columns:
    """Return the columns of two arrays; only `left` and `right` if the rest isn't defined."""
    spreads = Columns(left=compute_spread(left), right=compute_spread(right))
    if left.shape != right.shape or left.size == 0:
        return spreads
    x, y = (np.asarray(side, np.float64).ravel() for side in (left, right))
    if not (np.isfinite(x).all() and np.isfinite(y).all()):
        return spreads
    difference = np.abs(x - y)
    is_nonzero = np.abs(y) > EPSILON
    relative = np.abs(x[is_nonzero] / y[is_nonzero] - 1)
    right_norm = compute_norm(y)
    return replace(
        spreads,
        cosine=compute_cosine(x, y),
        max_absolute=float(difference.max()),
        accumulated_relative=float(relative.sum()),
        relative_euclidean=0.0 if right_norm <= TINY else compute_norm(x - y) / right_norm,
        divergence=compute_divergence(x, y),
        mean_absolute=float(difference.mean()),
        root_mean_square=float(np.sqrt(np.square(difference).mean())),
        max_relative=float(relative.max(initial=0.0)),
        mean_relative=float(relative.mean()) if relative.size else 0.0,
    )


def compute_cosine(x: np.ndarray, y: np.ndarray) -> float:
    """Return x.y / (|x| |y|): 1 for scalars and if both are all 0, NaN if only one is."""
    x_norm = compute_norm(x)
    y_norm = compute_norm(y)
    if x.size == 1 or max(x_norm, y_norm) <= TINY:
        return 1.0
    if min(x_norm, y_norm) <= TINY:
        return nan
    # Divided by one norm at a time: the product of two small norms may be 0.
    return float(np.clip((x / x_norm * (y / y_norm)).sum(), -1.0, 1.0))


def compute_divergence(x: np.ndarray, y: np.ndarray) -> float:
    """Return the divergence: NaN if only one is all 0, infinite if y alone is 0 at an element."""
    are_zero = [compute_norm(side) <= TINY for side in (x, y)]
    if all(are_zero):
        return 0.0
    if any(are_zero):
        return nan
    if ((y == 0) & (x != 0)).any():
        return inf
    p = _compute_distribution(x)
    q = _compute_distribution(y)
    divergence = float((p * np.log(p / q)).sum())
    return 0.0 if abs(divergence) < EPSILON else divergence


def _compute_distribution(x: np.ndarray) -> np.ndarray:
    """Scale an array to 0 to 1, raise it to at least epsilon, and divide it by its sum."""
    low = x.min()
    high = x.max()
    scaled = (x - low) / (high - low) if high > low else np.ones_like(x)
    raised: np.ndarray = np.maximum(scaled, EPSILON)
    return raised / raised.sum()


def compute_norm(x: np.ndarray) -> float:
    """Return the Euclidean norm of an array, summed in float64."""
    flat = np.asarray(x, np.float64).ravel()
    return float(np.sqrt(np.square(flat).sum()))


def compute_spread(x: np.ndarray) -> MeanAndDeviation:
    """Return mean and standard deviation of all elements; NaN for an empty array."""
    flat = np.asarray(x, np.float64).ravel()
    if not flat.size:
        return _UNDEFINED
    with np.errstate(invalid="ignore", over="ignore"):
        return MeanAndDeviation(float(flat.mean()), float(flat.std()))


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


def write_page(rows: Sequence[TensorRow], path: Path, limits: Thresholds) -> None:
    """Write the page of a comparison's rows; sliders begin at `limits`. Raises RunError if the file
    can't be written."""
    text = render_page(
        Page("compare", "Comparison", f"{len(rows):,} rows; a row beyond a limit is marked."),
        "comparison.html",
        content=make_page_data(rows, limits),
    )
    with convert_write_errors(path):
        write_whole(path, text)


def make_page_data(rows: Sequence[TensorRow], limits: Thresholds) -> dict[str, Any]:
    """Return the input of the page's script as a tree for JSON."""

    def make_limit(name: str, value: float, upper: float, *, below: bool = False) -> dict[str, Any]:
        return {
            "name": name,
            "column": HEADER.index(name),
            "below": below,
            "value": value,
            "min": 0,
            "max": upper,
            "step": upper / 1000,
        }

    return {
        "header": HEADER,
        "rows": [row.cells for row in rows],
        "limits": [
            make_limit("CosineSimilarity", limits.cosine, 1.0, below=True),
            make_limit("MaxAbsoluteError", limits.max_absolute, 5.0),
            make_limit("RelativeEuclideanDistance", limits.relative_euclidean, 1.0),
        ],
    }
