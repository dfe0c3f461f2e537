"""Columns of a table as they are read from a file, before they are encoded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.core.files.name_text import find_nearest, show_name
from pipeline.core.registry import MAX_FLOAT
from pipeline.data.table import Kind

MAX_COLUMNS = 20_000
"""Most columns of a file. A hostile file can have millions."""
KindOf = Callable[[str], Kind]
"""Function that returns the kind of a column by the column's name."""


@dataclass(frozen=True)
class Texts:
    """A column of texts."""

    codes: np.ndarray
    """The index in `texts` of each row's text, int32 (rows,); -1 if it is missing."""
    texts: tuple[str, ...]
    """The different texts of the column."""

    def count_rows(self, rows: np.ndarray | slice = slice(None)) -> np.ndarray:
        """Return the number of rows with each text, int64 (texts,)."""
        codes = self.codes[rows]
        return np.bincount(codes[codes >= 0], minlength=len(self.texts))


@dataclass(frozen=True)
class Quantity:
    """How a column of numbers was read from texts such as 5 kg."""

    unit: str
    """The unit or currency of all texts; empty if they only have marks between thousands."""
    texts: Texts
    """The column before it was read."""
    number: float
    """The number of `example`."""

    @property
    def example(self) -> str:
        """The first of the texts."""
        return self.texts.texts[0]


RawColumn = np.ndarray | Texts
"""Numbers, float64 (rows,), NaN for a missing number; or texts."""


@dataclass(frozen=True)
class RawTable:
    """The columns that were read from a file."""

    columns: Mapping[str, RawColumn]
    """The columns by name, without those that are ignored."""
    names: tuple[str, ...]
    """The names of all columns of the file."""
    rows: int
    """The number of rows."""
    locate: Callable[[int], str]
    """Function that returns the place of a row in the file, such as "line 2". The first row is 0.
    """
    quantities: Mapping[str, Quantity] = field(default_factory=dict)
    """How columns of numbers were read from texts with a unit, by name."""

    def keep_texts(self, names: Iterable[str]) -> RawTable:
        """Return the table with the texts of columns that were read as quantities."""
        texts = {name: self.quantities[name].texts for name in names if name in self.quantities}
        quantities = {name: self.quantities[name] for name in self.quantities if name not in texts}
        return replace(self, columns={**self.columns, **texts}, quantities=quantities)

    def get_column(self, name: str) -> RawColumn:
        """Return a column. Raises ValueError with the nearest name if it is missing."""
        if name not in self.columns:
            raise ValueError(describe_missing_column(name, self.names))
        return self.columns[name]

    def get_numbers(self, name: str) -> np.ndarray:
        """Return the numbers of a column, float64 (rows,). Raises ValueError if it is missing, and
        with the first row that isn't a number."""
        column = self.get_column(name)
        if isinstance(column, np.ndarray):
            return column
        _, first_rows = np.unique(column.codes, return_index=True)  # the first row of each text
        for row in np.sort(first_rows).tolist():
            code = column.codes[row]
            if code >= 0 and not is_number(column.texts[code]):
                raise ValueError(
                    f"{self.locate(row)}: {show_name(name)} = {column.texts[code]!r:.60}: must be "
                    "a number"
                )
        raise ValueError(f"{show_name(name)}: must be numbers")


def describe_missing_column(name: str, names: Iterable[str]) -> str:
    """Return a message for a missing column, with the nearest name."""
    names = list(names)
    guess = find_nearest(name, names)
    question = f"; did you mean {show_name(guess)}?" if guess else ";"
    ellipsis = ", ..." if len(names) > 20 else ""
    columns = ", ".join(map(show_name, names[:20]))
    return f"has no column {show_name(name)}{question} it has {columns}{ellipsis}"


def require_unique(names: Iterable[str]) -> None:
    """Raise ValueError for repeated names of columns."""
    repeated = [name for name, count in Counter(names).items() if count > 1]
    if repeated:
        raise ValueError(f"has the column {', '.join(map(show_name, repeated[:5]))} more than once")


def require_finite(name: str, values: np.ndarray, locate: Callable[[int], str]) -> None:
    """Raise ValueError for the first number that is infinite or beyond float32."""
    is_too_large = np.abs(values) > MAX_FLOAT
    if is_too_large.any():
        row = int(np.argmax(is_too_large))
        raise ValueError(
            f"{locate(row)}: {show_name(name)} = {values[row]:g}: must be a number of at most "
            f"{MAX_FLOAT:.4g}, the largest of float32, or missing"
        )


def is_number(text: str) -> bool:
    """Return whether a text is a number. Python's underscores between digits aren't allowed."""
    try:
        float(text)
    except ValueError:
        return False
    return "_" not in text


def sort_class_names(names: Iterable[str]) -> tuple[str, ...]:
    """Return the different names of classes, in the order of numbers if all of them are numbers,
    else in the order of texts. Equal numbers, as 1 and 1.0, are in the order of texts."""
    ordered = sorted(set(names))
    return tuple(sorted(ordered, key=float) if all(map(is_number, ordered)) else ordered)
