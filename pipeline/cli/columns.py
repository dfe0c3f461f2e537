"""`python -m pipeline columns`: the columns of a file, as `dataset=csv` reads them, or those of a
recipe's dataset, and what the network reads of them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import align_columns
from pipeline.core.reporter import Reporter, make_console
from pipeline.data.columns import ColumnSpec, SplitKey
from pipeline.data.inputs import Dataset, NetworkInput
from pipeline.data.padding.buckets import compute_canvas
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import TableFormat
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.quantities import find_date_formats, parse_days
from pipeline.data.tables.raw_table import RawTable
from pipeline.data.tables.table_targets import find_text_among_numbers
from pipeline.data.transform import compute_column_specs
from pipeline.stages.data import SPLITS, load_data
from pipeline.stages.sample_sizes import fit_specs_to_bucket

MAX_VALUES = 4
"""Number of a category's most frequent values that are printed."""


def main(
    words: Sequence[str],
    *,
    no_header: bool = False,
    delimiter: str | None = None,
    decimal: str | None = None,
    encoding: str | None = None,
) -> CommandResult:
    """Print a line for each column of the file that `words` names, or else of the dataset of the
    recipe and keys in `words`. None stands for the default of dataset=csv.

    Raises UsageError for words of neither kind, options of files with a recipe, and a value that
    dataset=csv doesn't accept; DataError if data can't be read or a file has no rows; RecipeError
    for an invalid recipe.
    """
    options = {"delimiter": delimiter, "decimal": decimal, "encoding": encoding}
    if _is_override(words[0]):
        if wrong := [word for word in words if not _is_override(word)]:
            raise UsageError(wrong, "must be KEY=VALUE after a recipe or a key")
        used = [f"--{name}" for name, value in options.items() if value is not None]
        if used := [*used, *(["--no-header"] if no_header else [])]:
            raise UsageError(used, "is for files; a recipe has keys of the dataset instead")
        return _list_dataset_columns(words)
    if len(words) > 1:
        raise UsageError(words[1:], "must not follow a file; name one file, or a recipe and keys")
    file = Path(words[0])
    settings = {
        "missing_values": CsvTable.model_fields["missing_values"].default,
        "header": not no_header,
        **{name: value for name, value in options.items() if value is not None},
    }
    try:
        table_format = TableFormat.model_validate(settings)
    except ValidationError as error:
        names = [str(item["loc"][0]) for item in error.errors()]
        options_given = [f"--{name} {settings[name]}" for name in names]
        raise UsageError(options_given, "; ".join(describe_problems(error, settings))) from error
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


def _is_override(word: str) -> bool:
    return word[:1] in ("+", "~") or ("=" in word and not os.path.exists(word))


def _list_dataset_columns(overrides: Sequence[str]) -> CommandResult:
    """Print the columns of a recipe's dataset before and after the map ops, and what its network
    reads of them."""
    recipe = compose_and_check(overrides)
    # Progress of reading the dataset goes to stderr.
    with Reporter(console=make_console(stderr=True)) as reporter:
        dataset = load_data(recipe, reporter)
    specs = {key: _find_specs(dataset, key) for key in SPLITS}
    parts = [part for by_part in specs.values() for part in by_part.values()]
    names = dict.fromkeys(name for part in parts for name in part)
    rows = [["column", "train", "mapped", "eval", "mapped"]]
    for name in names:
        cells = [_format_spec(part[name]) if name in part else "" for part in parts]
        rows.append([show_name(name), *cells])
    inputs = [["input", "column", "read as"]]
    inputs += [
        [show_name(array.name), show_name(array.column), _format_spec(array)]
        for array in dataset.inputs.arrays
    ]
    for line in (*align_columns(rows), "", *align_columns(inputs)):
        print(line)
    return CommandResult(
        {
            "dataset": recipe.dataset.name,
            "rows": {"train": len(dataset.train), "eval": len(dataset.whole_eval)},
            "columns": {
                name: {
                    key: {
                        step: _spec_to_dict(part[name])
                        for step, part in by_part.items()
                        if name in part
                    }
                    for key, by_part in specs.items()
                }
                for name in names
            },
            "inputs": {
                array.name: {"column": array.column, **_spec_to_dict(array)}
                for array in dataset.inputs.arrays
            },
        }
    )


def _find_specs(dataset: Dataset, key: SplitKey) -> dict[str, Mapping[str, ColumnSpec]]:
    """Return the specs of a split's columns before its map ops, `raw`, and after them, `mapped`;
    with buckets those of a size that holds all."""
    split, ops = (
        (dataset.train, dataset.train_ops)
        if key == "train"
        else (dataset.whole_eval, dataset.eval_ops)
    )
    specs = split.specs()
    padding = dataset.padding
    if padding.buckets:
        specs = fit_specs_to_bucket(compute_canvas(padding.buckets), specs, padding.column)
    return {"raw": specs, "mapped": compute_column_specs(ops, specs)}


def _format_spec(spec: ColumnSpec | NetworkInput) -> str:
    """Return dtype and shape, such as uint8 28x28x1."""
    return f"{spec.dtype} {'x'.join(map(str, spec.shape)) or 'number'}"


def _spec_to_dict(spec: ColumnSpec | NetworkInput) -> dict[str, Any]:
    return {"shape": list(spec.shape), "dtype": spec.dtype}


def _describe_column(table: RawTable, name: str) -> str:
    """Return a column's kind, range or most frequent values, and number of missing values."""
    column = table.columns[name]
    if isinstance(column, np.ndarray):
        present = column[~np.isnan(column)]
        if not present.size:
            return "empty     no values"
        value_range = f"{present.min():g} to {present.max():g}, mean {present.mean():.6g}"
        missing = _describe_missing(table.rows - present.size)
        quantity = table.quantities.get(name)
        unit = f", as {show_name(quantity.example)}" if quantity is not None else ""
        return f"numeric   {value_range}, {len(np.unique(present)):,} different{unit}{missing}"
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
