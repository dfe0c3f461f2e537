"""The columns of a table, fitted on the training split and saved with the run."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator

from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import Seq, Spec

ColumnKind = Literal["numeric", "category"]
"""Kind of a column after fitting. Dates have become numbers."""
Kind = Literal["auto", "numeric", "category", "date", "ignore"]
"""How a column of a file is read; auto: inferred from its values."""
DatePart = Literal["days", "sin_year", "cos_year", "sin_week", "cos_week", "sin_day", "cos_day"]
MAX_LISTED = 8
"""The most columns of each kind whose names are in the log."""


def _require_delimiter(delimiter: str) -> str:
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise ValueError(f"{delimiter!r:.60}: must be one character, and no quote or line break")
    return delimiter


def require_encoding(encoding: str) -> str:
    """Return the name of an encoding. Raises ValueError if it isn't an encoding of texts."""
    try:
        "a".encode(encoding)  # raises for codecs such as base64, unlike `codecs.lookup`
    except (LookupError, ValueError) as error:
        raise ValueError(
            f"{encoding!r:.60}: must be an encoding of texts, such as utf-8 or latin-1"
        ) from error
    return encoding


Delimiter = Annotated[str, AfterValidator(_require_delimiter)]
Encoding = Annotated[str, AfterValidator(require_encoding)]


class TableFormat(Spec):
    """The format of a CSV file; `CsvTable` describes the fields."""

    delimiter: Delimiter | None = None
    header: bool = True
    decimal: Literal[".", ","] = "."
    encoding: Encoding = "utf-8"
    missing_values: Seq[str] = ()


class DateColumn(Spec):
    """The computation of a column of numbers from a column of dates."""

    format: str
    """The format of the dates for `datetime.strptime`, or iso."""
    part: DatePart
    """The number: days since `first_day`, or sine or cosine of the position in a year, week or day.
    """
    first_day: float = 0.0
    """The first date of the training split, in days since 1970."""


class TableColumn(Spec):
    """A column of numbers or categories, or a number computed from a column of dates. Its mean,
    standard deviation and categories are computed from the training split."""

    name: str
    kind: ColumnKind
    mean: float = 0.0
    """Mean of the present numbers in the training split, which replaces missing numbers."""
    std: float = 1.0
    """Standard deviation of the same numbers; 1 if they are all equal."""
    unit: str = ""
    """The unit or currency that the texts of numbers have, such as kg; empty: they have none."""
    standardised: bool = True
    """Whether numbers are encoded as `(number - mean) / std`. Otherwise they are unchanged."""
    clipped: bool = False
    """Whether a standardised number x becomes x / sqrt(1 + (x / 3)^2), between -3 and 3."""
    indicator: bool = False
    """Whether an encoded row has another number for the column: 1 if its number is missing, else 0.
    """
    categories: Seq[str] = ()
    """The different values in the training split. A missing value is the empty text."""
    identifies: bool = False
    """Whether the categories are whole numbers, which a file has as numbers."""
    date: DateColumn | None = None
    """How the numbers are computed from dates; null: the file has numbers."""


class FittedTable(Spec):
    """The columns that a network reads, numbers before categories.

    A row is encoded as float32 (width,): the numbers, the indicators, and for each category column
    the position of its value in `categories`, from 1; 0 for a value that isn't in the training
    split. `EncodeTable` converts it to the network's input, in the compiled step.
    """

    columns: Seq[TableColumn]
    format: TableFormat
    left_out: Seq[str] = ()
    """Columns without any value in the training split."""

    @property
    def numeric(self) -> tuple[TableColumn, ...]:
        return tuple(column for column in self.columns if column.kind == "numeric")

    @property
    def categories(self) -> tuple[TableColumn, ...]:
        return tuple(column for column in self.columns if column.kind == "category")

    @property
    def num_numbers(self) -> int:
        """The length of the numeric part of an encoded row, including indicators."""
        return len(self.numeric) + sum(column.indicator for column in self.numeric)

    @property
    def width(self) -> int:
        """The number of values in an encoded row."""
        return self.num_numbers + len(self.categories)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as JSON values, from which `FittedTable.model_validate` restores it."""
        return self.model_dump(mode="json")

    def __str__(self) -> str:
        parts: dict[str, list[str]] = {}
        for column in self.numeric:
            if column.date is not None:
                parts.setdefault(show_name(column.name), []).append(column.date.part)
        columns = {
            "numeric": [show_name(column.name) for column in self.numeric if column.date is None],
            "date": [f"{name} ({', '.join(dates)})" for name, dates in parts.items()],
            "indicators of missing": [
                show_name(column.name) for column in self.numeric if column.indicator
            ],
            "category": [
                f"{show_name(column.name)} ({len(column.categories)})" for column in self.categories
            ],
            "left out, without values:": [show_name(name) for name in self.left_out],
        }
        return "; ".join(
            f"{kind} {join_first(names, MAX_LISTED, before_more=', ')}"
            for kind, names in columns.items()
            if names
        )
