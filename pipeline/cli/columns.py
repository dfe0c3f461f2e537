"""`python -m pipeline columns FILE`: the columns of a table as `dataset=csv` reads them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.error_text import describe, shown
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import TableFormat
from pipeline.data.tables.dates import find_date_formats, parse_days
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import Numbers, RawTable, Texts
from pipeline.data.tables.table_targets import odd_text

SHOWN_VALUES = 4


def main(
    file: Path,
    *,
    no_header: bool = False,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> CommandResult:
    """Print the columns of a table.

    Raises UsageError for a value that dataset=csv doesn't take, DataError for a file that can't be
    read.
    """
    options = {"delimiter": delimiter, "decimal": decimal, "encoding": encoding}
    typed = {name: value for name, value in options.items() if value is not None}
    table = read_table(file, _form({**typed, "header": not no_header}), lambda name: "auto")
    if not table.rows:
        raise DataError(f"{file}: has no rows")
    print(printable(f"{file}: {table.rows:,} rows, {len(table.columns)} columns"))
    width = min(40, max((len(shown(name)) for name in table.columns), default=0))
    columns = {name: _described(table, name) for name in table.columns}
    for name, text in columns.items():
        print(f"  {shown(name):<{width}}  {text}")
    return CommandResult({"file": str(file), "rows": table.rows, "columns": columns})


def _form(options: Mapping[str, Any]) -> TableFormat:
    """Return the format of the file. Raises UsageError for other values."""
    missing = CsvTable.model_fields["missing_values"].default
    try:
        return TableFormat.model_validate({"missing_values": missing, **options})
    except ValidationError as error:
        names = [str(name) for item in error.errors() for name in item["loc"][:1]]
        typed = [f"--{name} {options[name]}" for name in names]
        raise UsageError(typed, "; ".join(describe(error, options))) from error


def _described(table: RawTable, name: str) -> str:
    column = table.columns[name]
    if isinstance(column, Numbers):
        there = column.values[~np.isnan(column.values)]
        if not there.size:
            return "empty     no values"
        numbers = f"numeric   {there.min():g} to {there.max():g}, mean {there.mean():.6g}"
        return f"{numbers}, {_different(len(np.unique(there)))}{_missing(table.rows - there.size)}"
    counts = column.counts()
    if not counts.size:
        return "empty     no values"
    missing = _missing(table.rows - int(counts.sum()))
    odd = odd_text(column)
    if odd is not None:
        row, text, share = odd
        return f"mixed     {share:.1%} numbers; {table.place(row)}: {shown(text)!r}{missing}"
    formats = find_date_formats(column.texts)
    if len(formats) == 1:
        days = parse_days(column.texts, formats[0])
        first, last = (shown(column.texts[int(at)]) for at in (days.argmin(), days.argmax()))
        return f"date      {first} to {last}, {_different(len(counts))}{missing}"
    return f"category  {_different(len(counts))}: {_frequent(column, counts)}{missing}"


def _frequent(column: Texts, counts: np.ndarray) -> str:
    first = np.argsort(-counts, kind="stable")[:SHOWN_VALUES]
    more = ", ..." if len(counts) > SHOWN_VALUES else ""
    return ", ".join(f"{shown(column.texts[i])} {counts[i]:,}" for i in first) + more


def _different(count: int) -> str:
    return f"{count:,} different"


def _missing(count: int) -> str:
    return f", {count:,} missing" if count else ""
