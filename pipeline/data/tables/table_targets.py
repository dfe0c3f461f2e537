"""Targets of a table: the task of its columns, and their labels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.data.columns import Targets, Task
from pipeline.data.tables.raw_table import RawColumn, RawTable, Texts, is_number, sort_class_names

FEW_CLASSES = 20
"""The most different whole numbers that are inferred as classes."""
MAX_TABLE_CLASSES = 10_000
RARE_SHARE, FEWEST_ROWS = 0.05, 100
"""The share below which a class is rare, in tables of at least as many rows."""
_FLAGS = {"0": 0.0, "1": 1.0, "false": 0.0, "true": 1.0, "no": 0.0, "yes": 1.0}
"""The labels of multi_label, by their texts in lower case."""


def infer_task(table: RawTable, names: Sequence[str]) -> Task:
    """Infer the task of target columns. It is classification for one column of texts, or of at most
    `FEW_CLASSES` whole numbers, multi_label for several columns of 0 and 1, else regression. Raises
    ValueError for a column that mixes numbers and texts, and for several columns with texts."""
    columns = [table.get_column(name) for name in names]
    if len(names) > 1:
        if all(_parse_flags(column) is not None for column in columns):
            return "multi_label"
        for name in names:
            table.get_numbers(name)
        return "regression"
    column = columns[0]
    if isinstance(column, Texts):
        require_one_type(names[0], column, table)
        return "classification"
    values = column[~np.isnan(column)]
    is_integer = np.array_equal(values, np.rint(values))
    is_class = is_integer and len(np.unique(values)) <= FEW_CLASSES
    return "classification" if is_class else "regression"


def find_text_among_numbers(column: Texts) -> tuple[int, str, float] | None:
    """Return the first row whose text isn't a number, the text, and the share of numbers. Returns
    None if at most half of the values are numbers, or all are."""
    counts = column.count_rows()
    are_numbers = np.array([is_number(text) for text in column.texts], bool)
    share = float(counts[are_numbers].sum() / max(1, counts.sum()))
    if share <= 0.5 or are_numbers.all():
        return None
    row = int(np.flatnonzero((column.codes >= 0) & ~are_numbers[column.codes])[0])
    return row, column.texts[column.codes[row]], share


def require_one_type(name: str, column: Texts, table: RawTable) -> None:
    """Raise ValueError if more than half, but not all, of the texts are numbers."""
    mixed = find_text_among_numbers(column)
    if mixed is None:
        return
    row, text, share = mixed
    raise ValueError(
        f"{table.locate(row)}: {show_name(name)} = {text!r:.60}, and {share:.1%} of its values are "
        "numbers; correct it, or add it to dataset.missing_values, or the column to "
        "dataset.categories"
    )


def list_target_classes(table: RawTable, name: str) -> tuple[str, ...]:
    """Return the names of the classes of a column in their order. Raises ValueError for fewer than
    two, and for more than `MAX_TABLE_CLASSES`."""
    column = table.get_column(name)
    if isinstance(column, np.ndarray):
        values = np.unique(column[~np.isnan(column)])
        names = tuple(map(_format_number, values[: MAX_TABLE_CLASSES + 1]))
    else:
        names = sort_class_names(column.texts)
    if len(names) > MAX_TABLE_CLASSES:
        raise ValueError(
            f"{show_name(name)} has more than {MAX_TABLE_CLASSES:,} different values, too many "
            "classes; set dataset.task=regression if they are numbers"
        )
    if len(names) < 2:
        value_text = f"{show_name(names[0])} in every row" if names else "missing in every row"
        raise ValueError(f"{show_name(name)} is {value_text}; nothing can be learned from it")
    return names


def read_labels(table: RawTable, targets: Targets, columns: Sequence[str]) -> np.ndarray:
    """Return the labels of all rows: int32 (rows,) for classes, else float64 (rows, K). Raises
    ValueError with the row of a missing value or an unknown class."""
    if targets.task == "classification":
        return _read_classes(table, columns[0], targets.names)
    read_column = _read_numbers if targets.task == "regression" else _read_flag_labels
    return np.stack([read_column(table, name) for name in columns], axis=1)


def describe_rare_class(labels: np.ndarray, targets: Targets) -> tuple[str, ...]:
    """Return a note on the rarest class, int (rows,), if it has less than `RARE_SHARE` of at least
    `FEWEST_ROWS` training rows, and less than half of an even share; else ()."""
    if targets.task != "classification" or len(labels) < FEWEST_ROWS:
        return ()
    counts = np.bincount(labels, minlength=len(targets))
    rarest = int(counts.argmin())
    share = counts[rarest] / len(labels)
    if share >= min(RARE_SHARE, 0.5 / len(targets)):
        return ()
    name = show_name(targets.names[rarest])
    return (
        f"class {name} has {counts[rarest]:,} of {len(labels):,} training rows ({share:.1%}), so "
        "the accuracy hardly depends on it; train.loss.class_weights=balanced weighs it as much as "
        "the others, and eval.metrics=[balanced_accuracy] shows it",
    )


def _read_classes(table: RawTable, name: str, classes: Sequence[str]) -> np.ndarray:
    """Return the class of each row, int32. Raises ValueError for a missing or unknown class."""
    column = table.get_column(name)
    class_ids = {text: class_id for class_id, text in enumerate(classes)}
    if isinstance(column, np.ndarray):
        values, codes = np.unique(column, return_inverse=True)
        texts = tuple("" if np.isnan(value) else _format_number(value) for value in values)
        column = Texts(np.where(np.isnan(column), -1, codes), texts)
    # The code -1 of a missing value selects the last label, which is -1.
    labels = np.array([*(class_ids.get(text, -1) for text in column.texts), -1], np.int32)
    labels = labels[column.codes]
    wrong_rows = np.flatnonzero(labels < 0)
    if wrong_rows.size:
        row = int(wrong_rows[0])
        _require_present(table, name, column.codes < 0)
        text = column.texts[column.codes[row]]
        raise ValueError(
            f"{table.locate(row)}: {show_name(name)} = {text!r:.60}: no row of the training split "
            "has this class"
        )
    return labels


def _read_numbers(table: RawTable, name: str) -> np.ndarray:
    """Return the number of each row, float64. Raises ValueError for other or missing values."""
    values = table.get_numbers(name)
    _require_present(table, name, np.isnan(values))
    return values


def _read_flag_labels(table: RawTable, name: str) -> np.ndarray:
    """Return 0 or 1 for each row, float64. Raises ValueError for other or missing values."""
    column = table.get_column(name)
    is_missing = np.isnan(column) if isinstance(column, np.ndarray) else column.codes < 0
    _require_present(table, name, is_missing)
    flags = _parse_flags(column)
    if flags is None:
        raise ValueError(
            f"{show_name(name)} has values other than 0 and 1, which multi_label needs"
        )
    return flags


def _parse_flags(column: RawColumn) -> np.ndarray | None:
    """Return 0 or 1 for each row, float64 (rows,), NaN if missing; None for other columns."""
    if isinstance(column, np.ndarray):
        return column if np.isin(column[~np.isnan(column)], (0, 1)).all() else None
    flags = [_FLAGS.get(text.lower()) for text in column.texts]
    if None in flags:
        return None
    return np.array([*flags, np.nan], np.float64)[column.codes]


def _require_present(table: RawTable, name: str, is_missing: np.ndarray) -> None:
    """Raise ValueError with the first row whose target is missing."""
    if is_missing.any():
        row = int(np.argmax(is_missing))
        raise ValueError(
            f"{table.locate(row)}: {show_name(name)} is missing, and it is a target; "
            "remove such rows from the file"
        )


def _format_number(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(float(value))
