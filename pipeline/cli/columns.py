"""`python -m pipeline columns FILE`: the columns of a table as `dataset=csv` reads them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
from pydantic import ValidationError

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.error_text import describe_problems, show_name
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import TableFormat
from pipeline.data.tables.dates import find_date_formats, parse_days
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import RawTable
from pipeline.data.tables.table_targets import find_text_among_numbers

MAX_VALUES = 4
"""Number of a category's most frequent values that are printed."""


def main(
    file: Path,
    *,
    no_header: bool = False,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> CommandResult:
    """Print a line for each column of a table. None stands for the default of dataset=csv.

    Raises UsageError for a value that dataset=csv doesn't accept, and DataError if the file can't
    be read or has no rows.
    """
    options = {"delimiter": delimiter, "decimal": decimal, "encoding": encoding}
    settings = {
        "missing_values": CsvTable.model_fields["missing_values"].default,
        "header": not no_header,
        **{name: value for name, value in options.items() if value is not None},
    }
    try:
        table_format = TableFormat.model_validate(settings)
    except ValidationError as error:
        names = [str(item["loc"][0]) for item in error.errors()]
        words = [f"--{name} {settings[name]}" for name in names]
        raise UsageError(words, "; ".join(describe_problems(error, settings))) from error
    try:
        table = read_table(file, table_format, lambda name: "auto")
    except DataError as error:
        # Errors name keys of a recipe, which are options of this command.
        message = re.sub(rf"\bdataset\.({'|'.join(options)})\b", r"--\1", str(error))
        raise DataError(message) from error
    if not table.rows:
        raise DataError(f"{file}: has no rows")
    print(printable(f"{file}: {table.rows:,} rows, {len(table.columns)} columns"))
    width = min(40, max((len(show_name(name)) for name in table.columns), default=0))
    columns = {name: _describe_column(table, name) for name in table.columns}
    for name, text in columns.items():
        print(f"  {show_name(name):<{width}}  {text}")
    return CommandResult({"file": str(file), "rows": table.rows, "columns": columns})


def _describe_column(table: RawTable, name: str) -> str:
    """Return a column's kind, range or most frequent values, and number of missing values."""
    column = table.columns[name]
    if isinstance(column, np.ndarray):
        present = column[~np.isnan(column)]
        if not present.size:
            return "empty     no values"
        value_range = f"{present.min():g} to {present.max():g}, mean {present.mean():.6g}"
        missing = _describe_missing(table.rows - present.size)
        return f"numeric   {value_range}, {len(np.unique(present)):,} different{missing}"
    counts = column.count_rows()
    if not counts.size:
        return "empty     no values"
    missing = _describe_missing(table.rows - int(counts.sum()))
    text_cell = find_text_among_numbers(column)
    if text_cell is not None:
        row, text, number_share = text_cell
        place = f"{table.locate(row)}: {show_name(text)!r}"
        return f"mixed     {number_share:.1%} numbers; {place}{missing}"
    different = f"{len(counts):,} different"
    formats = find_date_formats(column.texts)
    if len(formats) == 1:
        days = parse_days(column.texts, formats[0])
        first = show_name(column.texts[int(days.argmin())])
        last = show_name(column.texts[int(days.argmax())])
        return f"date      {first} to {last}, {different}{missing}"
    most_frequent = np.argsort(-counts, kind="stable")[:MAX_VALUES]
    values = [f"{show_name(column.texts[code])} {counts[code]:,}" for code in most_frequent]
    values += ["..."] if len(counts) > MAX_VALUES else []
    return f"category  {different}: {', '.join(values)}{missing}"


def _describe_missing(count: int) -> str:
    return f", {count:,} missing" if count else ""
