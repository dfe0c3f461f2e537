"""`python -m pipeline columns FILE`: the columns of a table as `dataset=csv` reads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.error_text import shown
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import TableFormat
from pipeline.data.tables.dates import find_date_formats, parse_days
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import Numbers, RawTable, Texts
from pipeline.data.tables.table_targets import odd_text

USAGE = "columns takes FILE, and delimiter=, decimal=, encoding= and header="
HELP = """usage: python -m pipeline columns FILE [KEY=VALUE ...]

Print the columns of a CSV or Parquet file, with the type that is found and what is missing.

  FILE        a CSV file, or one that ends in .parquet
  KEY=VALUE   how it is written, as dataset=csv has it: delimiter, decimal, encoding, header

example: python -m pipeline columns houses.csv
"""
SHOWN_VALUES = 4


def main(args: Sequence[str]) -> int:
    """Print the columns of a table; the exit status is 0.

    Raises UsageError for other arguments, DataError for a file that can't be read.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    files = [arg for arg in args if "=" not in arg and not arg.startswith("-")]
    given = dict(arg.split("=", 1) for arg in args if "=" in arg)
    if len(files) != 1 or len(files) + len(given) != len(args):
        raise UsageError(args, USAGE)
    file = Path(files[0])
    table = read_table(file, _form(given), lambda name: "auto")
    if not table.rows:
        raise DataError(f"{file}: has no rows")
    print(printable(f"{file}: {table.rows:,} rows, {len(table.columns)} columns"))
    width = min(40, max((len(shown(name)) for name in table.columns), default=0))
    for name in table.columns:
        print(f"  {shown(name):<{width}}  {_described(table, name)}")
    return 0


def _form(given: dict[str, str]) -> TableFormat:
    """The format of the file. Raises UsageError for other keys and values."""
    wanted: dict[str, Any] = dict(given)
    if given.get("header", "true").lower() not in ("true", "false"):
        raise UsageError([f"header={given['header']}"], "must be true or false")
    wanted["header"] = given.get("header", "true").lower() == "true"
    missing = CsvTable.model_fields["missing_values"].default
    try:
        return TableFormat.model_validate({"missing_values": missing, **wanted})
    except ValidationError as error:
        raise UsageError([f"{key}={value}" for key, value in given.items()], USAGE) from error


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
