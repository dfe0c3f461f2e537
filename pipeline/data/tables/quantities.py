"""Numbers with a unit, a currency or marks between thousands, such as 5 kg, $1,000 and 1,000."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from math import isfinite

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.data.tables.raw_table import (
    KindOf,
    Quantity,
    RawColumn,
    RawTable,
    Texts,
    require_finite,
)

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
