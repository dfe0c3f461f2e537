"""A table as a network reads it: columns, fitted on the training split and saved with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pipeline.core.files.error_text import show_name
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import Seq, Spec

ColumnKind = Literal["numeric", "category"]
Kind = Literal["auto", "numeric", "category", "date", "ignore"]
"""Reading of a column: as numbers, texts, dates, not at all, or inferred (auto)."""
DatePart = Literal["days", "sin_year", "cos_year", "sin_week", "cos_week", "sin_day", "cos_day"]

LISTED = 8
"""Columns that a line of the log names of each kind."""


def _require_delimiter(delimiter: str) -> str:
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise ValueError(f"{delimiter!r:.60}: must be one character, and no quote or line break")
    return delimiter


def _require_encoding(encoding: str) -> str:
    """Raise ValueError for a name that no encoding of texts has."""
    try:
        "a".encode(encoding)  # refuses base64 and the like, which `lookup` knows too
    except (LookupError, ValueError) as error:
        raise ValueError(
            f"{encoding!r:.60}: must be an encoding of texts, such as utf-8 or latin-1"
        ) from error
    return encoding


Delimiter = Annotated[str, AfterValidator(_require_delimiter)]
Encoding = Annotated[str, AfterValidator(_require_encoding)]


class TableFormat(Spec):
    """How a CSV file is written."""

    delimiter: Delimiter | None = None
    """null: whichever of comma, semicolon, tab and bar the first line has most of, else spaces; a
    space stands for one or more of them."""
    header: bool = True
    decimal: Literal[".", ","] = "."
    encoding: Encoding = "utf-8"
    missing_values: Seq[str] = ()
    """Texts that stand for a missing value, as the empty one always does."""


class DateColumn(Spec):
    """A part of a column of dates, which is a number."""

    format: str
    """The format of `datetime.strptime`, or iso."""
    part: DatePart
    first_day: float = 0.0
    """The first date of the training split, in days since 1970."""


class TableColumn(Spec):
    """One column of a table, as the training split has it; of dates there is one for each part."""

    name: str
    kind: ColumnKind
    mean: float = 0.0
    """Mean of the numbers that aren't missing. A missing one becomes the mean."""
    std: float = 1.0
    standardised: bool = True
    """Whether numbers are encoded as `(number - mean) / std`, else as they are."""
    indicator: bool = False
    """Whether it has a second column, 1 if a number is missing."""
    categories: Seq[str] = ()
    """The values in the training split. The empty text stands for missing values, if any."""
    date: DateColumn | None = None
    """The part of a date that is the number; null: the column has numbers itself."""


class FittedTable(Spec):
    """The columns that a network reads, numbers before categories.

    A row is encoded as float32 (width,): the numbers, standardised, then the indicators, then of
    each category the position of its value from 1, and 0 for a value that the training
    split lacks. `EncodeTable` makes the network's input of it, inside of the compiled step.
    """

    columns: Seq[TableColumn]
    format: TableFormat
    left_out: Seq[str] = ()
    """Columns without any value in the training split."""

    @property
    def numeric(self) -> tuple[TableColumn, ...]:
        """The columns of numbers."""
        return tuple(column for column in self.columns if column.kind == "numeric")

    @property
    def categories(self) -> tuple[TableColumn, ...]:
        """The columns of categories."""
        return tuple(column for column in self.columns if column.kind == "category")

    @property
    def kinds(self) -> dict[str, Kind]:
        """How each column is to be read from another file."""
        return {column.name: "date" if column.date else column.kind for column in self.columns}

    @property
    def numbers(self) -> int:
        """The number of values of an encoded row that are numbers, indicators among them."""
        return len(self.numeric) + sum(column.indicator for column in self.numeric)

    @property
    def width(self) -> int:
        """The number of values of an encoded row."""
        return self.numbers + len(self.categories)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON, from which `FittedTable.model_validate` makes it again."""
        return self.model_dump(mode="json")

    def __str__(self) -> str:
        categories = [f"{show_name(c.name)} ({len(c.categories)})" for c in self.categories]
        numbers = [column for column in self.numeric if column.date is None]
        dates: dict[str, list[str]] = {}
        for column in self.numeric:
            if column.date is not None:
                dates.setdefault(show_name(column.name), []).append(column.date.part)
        return "; ".join(
            f"{kind} {join_first(names, LISTED, before_more=', ')}"
            for kind, names in (
                ("numeric", [show_name(c.name) for c in numbers]),
                ("date", [f"{name} ({', '.join(parts)})" for name, parts in dates.items()]),
                ("indicators of missing", [show_name(c.name) for c in self.numeric if c.indicator]),
                ("category", categories),
                ("left out, without values:", list(map(show_name, self.left_out))),
            )
            if names
        )
