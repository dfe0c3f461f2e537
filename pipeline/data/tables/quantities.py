"""Texts of a table that stand for numbers: dates, and numbers with a unit, a currency or marks
between thousands, such as 5 kg, $1,000 and 1,000."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import cache, lru_cache
from itertools import product
from math import isfinite

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.data.table import DateColumn, DatePart
from pipeline.data.tables.raw_table import (
    KindOf,
    Quantity,
    RawColumn,
    RawTable,
    Texts,
    require_finite,
)

ISO = "iso"
"""The format of dates such as 2024-01-31, also with a time. Offsets from UTC are dropped."""
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?!\d)")
_MAX_TRIED = 1000
"""Number of texts that a format is tried on first. Parsing all takes long."""
_YEAR = re.compile(r"\d{4}")
_DAY_DIRECTIVE = re.compile("%[^HIMSfpzZ%]")
"""A part of a format that stands for a part of the day, as the year after the time of `ctime`."""
_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y-%m"),
    *("%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
FORMATS = (ISO, *(day + time for day, time in product(_DAYS, _TIMES)))
"""Formats that are inferred, in order of preference."""
_DAY_PARTS: tuple[DatePart, ...] = ("days", "sin_year", "cos_year", "sin_week", "cos_week")
_HOUR_PARTS: tuple[DatePart, ...] = ("sin_day", "cos_day")
_EPOCH = datetime(1970, 1, 1)


def find_date_formats(texts: Sequence[str]) -> list[str]:
    """Return the formats that fit all texts: none, one, or two if day and month can be exchanged.
    If several formats result in the same dates, only the first of them is returned."""
    if not texts or not _YEAR.search(texts[0]):
        return []
    formats: dict[bytes, str] = {}  # by the dates that they result in
    for name in FORMATS:
        if all(_parse(text, name) is not None for text in texts[:_MAX_TRIED]):
            days = parse_days(texts, name)
            if not np.isnan(days).any():
                formats.setdefault(days.tobytes(), name)
    return list(formats.values())


def parse_days(texts: Sequence[str], date_format: str) -> np.ndarray:
    """Return dates as days since 1970, float64 (texts,). A text of another format is NaN."""
    days = np.full(len(texts), np.nan)
    for row, text in enumerate(texts):
        date = _parse(text, date_format)
        if date is not None:
            days[row] = (date - _EPOCH).total_seconds() / 86_400
    return days


def format_example_date(date_format: str) -> str:
    """Return an example of a date in a format. Raises ValueError for a format without a year, and
    for a format by which dates can't be parsed."""
    date = datetime(2024, 1, 31)
    if date_format == ISO:
        return f"{date:%Y-%m-%d}"
    example = date.strftime(date_format)
    if "%y" not in date_format.lower() or _parse(example, date_format) is None:
        raise ValueError(
            f"{date_format!r:.60}: must be a format of dates with their year, such as %d/%m/%Y"
        )
    return example


def list_date_parts(days: np.ndarray) -> tuple[DatePart, ...]:
    """Return the parts to compute from dates, with parts of the day if a date has a time."""
    has_hours = bool((days[~np.isnan(days)] % 1 != 0).any())
    return (*_DAY_PARTS, *_HOUR_PARTS) if has_hours else _DAY_PARTS


def compute_part_values(days: np.ndarray, date: DateColumn) -> np.ndarray:
    """Return the numbers that `DateColumn` describes, float64 (dates,); NaN for a missing date."""
    if date.part == "days":
        return days - date.first_day
    wave, _, cycle = date.part.partition("_")
    angle = 2 * np.pi * _compute_position(days, cycle)
    return np.sin(angle) if wave == "sin" else np.cos(angle)


def _compute_position(days: np.ndarray, cycle: str) -> np.ndarray:
    """Return the positions of dates in their day, week (from Monday) or year, from 0 to below 1."""
    if cycle == "day":
        return days % 1
    if cycle == "week":
        return (np.floor(days) + 3) % 7 / 7  # 1970 began on a Thursday
    date = np.floor(np.where(np.isnan(days), 0, days)).astype("datetime64[D]")
    year = date.astype("datetime64[Y]")
    year_start = year.astype("datetime64[D]")
    year_end = (year + np.timedelta64(1, "Y")).astype("datetime64[D]")
    share = (date - year_start).astype(np.float64) / (year_end - year_start).astype(np.float64)
    return np.where(np.isnan(days), np.nan, share)


def _parse(text: str, date_format: str) -> datetime | None:
    """Return the date of a text; None if it doesn't have the format."""
    if date_format == ISO:
        with suppress(ValueError):
            if _ISO_DATE.match(text):
                return datetime.fromisoformat(text).replace(tzinfo=None)
        return None
    time_start = max(date_format.find(" %H"), date_format.find(" %I"))
    if time_start < 0 or _DAY_DIRECTIVE.search(date_format, time_start):
        return _parse_part(text, date_format)
    # Days and times are parsed apart, since a column has few different ones, which are cached.
    words = text.rsplit(" ", date_format.count(" ", time_start))
    day = _parse_part(words[0], date_format[:time_start])
    time = _parse_part(" ".join(words[1:]), date_format[time_start + 1 :])
    return None if day is None or time is None else datetime.combine(day, time.time())


@lru_cache(maxsize=1 << 17)
def _parse_part(text: str, date_format: str) -> datetime | None:
    try:
        return datetime.strptime(text, date_format).replace(tzinfo=None)
    except ValueError:
        return None


_CURRENCIES = "$€£¥₩₹₽₺₴₫₦₱฿₪"
_CODES = "AUD BRL CAD CHF CNY CZK DKK EUR GBP HKD INR JPY KRW MXN NOK NZD PLN SEK SGD TRY USD ZAR"
_PREFIX = rf"(?:[A-Z]{{1,2}})?[{_CURRENCIES}]|{_CODES.replace(' ', '|')}"
"""Texts that may precede a number. Other letters may be a name, as in model 3."""
_FIRST = rf"[^\W\d_]|[{_CURRENCIES}°%‰]"
_SUFFIX = rf"(?:{_FIRST})(?:{_FIRST}|[/²³·^. ]|(?<=[\^A-Za-z])[23])*"
_SPACES = "\u00a0\u202f\u2009"
"""Spaces that don't break a line. After others another number may begin."""
_LONGEST = 60
"""Characters of the longest text that is a quantity."""


@cache
def _compile_pattern(decimal: str) -> re.Pattern[str]:
    thousands = "," if decimal == "." else "."
    grouped = rf"[0-9]{{1,3}}(?P<mark>[{thousands}'’{_SPACES}])[0-9]{{3}}(?:(?P=mark)[0-9]{{3}})*"
    number = rf"(?:{grouped}|[0-9]+)(?:{re.escape(decimal)}[0-9]+)?|{re.escape(decimal)}[0-9]+"
    space = rf"[ {_SPACES}]?"
    return re.compile(
        rf"(?P<sign>[+\-−]?){space}(?P<prefix>{_PREFIX})?{space}(?P<sign2>[+\-−]?)"
        rf"(?P<number>{number}){space}(?P<suffix>{_SUFFIX})?"
    )


def parse_quantity(text: str, decimal: str) -> tuple[float, str] | None:
    """Return the number and the unit of a text, "" without one; None for another text."""
    match = _compile_pattern(decimal).fullmatch(text) if len(text) <= _LONGEST else None
    if match is None or (match["sign"] and match["sign2"]):
        return None
    if match["prefix"] and match["suffix"]:
        return None
    digits = re.sub(rf"[^0-9{re.escape(decimal)}]", "", match["number"]).replace(decimal, ".")
    sign = -1.0 if (match["sign"] or match["sign2"]) in ("-", "−") else 1.0
    number = sign * float(digits)
    unit = match["prefix"] or match["suffix"] or ""
    return (number, " ".join(unit.split())) if isfinite(number) else None


def read_quantities(table: RawTable, decimal: str, kind_of: KindOf) -> RawTable:
    """Return a table whose columns of quantities of one unit are numbers. Columns must be numeric
    or auto by `kind_of`. Raises ValueError for a number beyond float32, and for a numeric column
    with the first row that isn't in the unit of most."""
    columns: dict[str, RawColumn] = dict(table.columns)
    quantities: dict[str, Quantity] = {}
    for name, column in table.columns.items():
        if not isinstance(column, Texts) or kind_of(name) not in ("auto", "numeric"):
            continue
        parsed = [parse_quantity(text, decimal) for text in column.texts]
        numbers = [number for number, _ in filter(None, parsed)]
        units = {unit for _, unit in filter(None, parsed)}
        if len(numbers) < len(parsed) or len(units) != 1:
            if kind_of(name) == "numeric":
                _require_one_unit(table, name, column, decimal)
            continue
        # The code -1 of a missing text selects the last of these, NaN.
        values = np.array([*numbers, np.nan])[column.codes]
        require_finite(name, values, table.locate)
        columns[name] = values
        quantities[name] = Quantity(units.pop(), column, numbers[0])
    return replace(table, columns=columns, quantities=quantities) if quantities else table


def _require_one_unit(table: RawTable, name: str, column: Texts, decimal: str) -> None:
    """Raise ValueError with the first row that isn't in the most frequent unit, if there is one."""
    parsed = [parse_quantity(text, decimal) or (0.0, "") for text in column.texts]
    counts = Counter[str]()
    for (_, unit), count in zip(parsed, column.count_rows().tolist(), strict=True):
        counts[unit] += count
    counts.pop("", None)
    if not counts:
        return
    expected = max(sorted(counts), key=counts.__getitem__)
    is_other = np.array([unit != expected for _, unit in parsed])
    row = int(np.flatnonzero((column.codes >= 0) & is_other[column.codes])[0])
    raise ValueError(
        f"{table.locate(row)}: {show_name(name)} = {column.texts[column.codes[row]]!r:.60}: must "
        f"be a number in {show_name(expected)}, as in other rows"
    )


def list_units(column: RawColumn, decimal: str) -> tuple[str, ...]:
    """Return the units of a column of texts that are all quantities, sorted; () for others."""
    if not isinstance(column, Texts):
        return ()
    parsed = [parse_quantity(text, decimal) for text in column.texts]
    return tuple(sorted({unit for _, unit in filter(None, parsed)})) if all(parsed) else ()


def find_other_mark(column: RawColumn, decimal: str) -> str | None:
    """Return the other decimal mark if only with it a column of texts are all quantities."""
    other = "." if decimal == "," else ","
    return other if not list_units(column, decimal) and list_units(column, other) else None


def require_units(table: RawTable, units: Mapping[str, str]) -> None:
    """Raise ValueError for a column in another unit than in the training split, by name.
    Numbers without a unit have the unit of the training split."""
    for name, quantity in table.quantities.items():
        unit = units.get(name, quantity.unit)
        if quantity.unit not in ("", unit):
            expected = f"in {show_name(unit)}" if unit else "without a unit"
            raise ValueError(
                f"{show_name(name)} = {quantity.example!r:.60}: must be {expected}, as in the "
                "training split"
            )


def describe_quantity(name: str, quantity: Quantity) -> str:
    """Return a note on how a column of quantities is read."""
    unit = f"numbers in {show_name(quantity.unit)}" if quantity.unit else "numbers with thousands"
    shown = show_name(name)
    return (
        f"column {shown}: {unit}, {show_name(quantity.example)} is read as {quantity.number:.15g}; "
        f"dataset.categories=[{shown}] reads texts"
    )
