"""Columns of series: the op that standardises them by the training split, and columns of times,
whose rows must be in order, without gaps and repeats.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
from pydantic import PositiveFloat

from pipeline.core.files.name_text import show_name
from pipeline.core.registry import Seq
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import Op
from pipeline.data.tables.quantities import find_date_formats, parse_days
from pipeline.data.tables.raw_table import RawTable, Texts, is_number


class ScaleSeries(Op):
    """(series - mean) / std in float32, with a mean and a std for each channel.

    Both are of the training split and saved with the run, so that a trained network reads series in
    the units of the data.
    """

    name: Literal["scale_series"] = "scale_series"
    column: str = "series"
    mean: Seq[float]
    std: Seq[PositiveFloat]

    def output(self, value: ColumnSpec) -> ColumnSpec:
        if len(value.shape) != 2 or value.shape[1] != len(self.mean):
            raise ValueError(f"needs series of {len(self.mean)} channels, not {value.shape}")
        return replace(value, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        mean = np.array(self.mean, np.float32)
        std = np.array(self.std, np.float32)
        # XLA replaces division by a constant with this product, but numpy doesn't.
        return (values.astype(np.float32) - mean) * (1 / std)


def fit_scale(values: np.ndarray) -> ScaleSeries:
    """Return the op for the training values, (..., channels), without those that are NaN. A channel
    whose values are all equal is only centred."""
    flat = np.asarray(values, np.float64).reshape(-1, values.shape[-1])
    mean = np.nanmean(flat, axis=0)
    std = np.nanstd(flat, axis=0)
    # The computed deviation of equal numbers such as 0.1 isn't always 0.
    is_constant = np.nanmax(flat, axis=0) == np.nanmin(flat, axis=0)
    # A float32 has no inverse of a smaller deviation.
    std[is_constant | (std < np.finfo(np.float32).tiny)] = 1.0
    return ScaleSeries(mean=tuple(mean.tolist()), std=tuple(std.tolist()))


TOLERANCE = 1e-6
"""Largest difference of two steps of time, as a share, that count as equal."""


@dataclass(frozen=True)
class RegularTimes:
    """A column of times."""

    name: str
    positions: np.ndarray
    """Times on an even axis, float64 (rows,): numbers, days since 1970 or months since 1970."""
    unit: str
    """" days", " months" or ""."""
    show: Callable[[int], str]
    """Function that returns the text of a row."""
    locate: Callable[[int], str]
    """Function that returns the place of a row in the file, such as "line 2"."""

    def require_even_steps(self, rows: np.ndarray) -> None:
        """Raise ValueError with the first row, of `rows` in their order, that is earlier than the
        row before it or a repeat of it; if none is, with the first further from it than others."""
        steps = np.diff(self.positions[rows])
        if not steps.size:
            return
        usual = float(np.sort(steps)[(len(steps) - 1) // 2])
        # Large times, such as seconds since 1970, are rounded more than the steps between them.
        rounding = 2 * np.spacing(np.abs(self.positions[rows]).max())
        is_wrong = (steps <= 0) | (np.abs(steps - usual) > TOLERANCE * abs(usual) + rounding)
        if not is_wrong.any():
            return
        # Two rows in the wrong order leave gaps around them, which aren't to be filled.
        is_late = steps <= 0
        first = int(np.flatnonzero(is_late if is_late.any() else is_wrong)[0])
        before, row = rows[first : first + 2].tolist()
        step = steps[first]
        text = f"{self.locate(row)}: {show_name(self.name)} = {self.show(row)}"
        if step == 0:
            raise ValueError(f"{text} is a repeat of the row before it; must be there once")
        if step < 0:
            raise ValueError(
                f"{text} is earlier than {self.show(before)} in the row before it; rows must be in "
                "the order of time"
            )
        raise ValueError(
            f"{text} comes {step:g}{self.unit} after {self.show(before)}, and most rows "
            f"{usual:g}{self.unit} after the one before; must have no gaps, so fill in the rows"
        )


def read_times(table: RawTable, name: str, date_format: str | None) -> RegularTimes:
    """Return the times of a column of texts, which are numbers or dates. Raises ValueError with the
    row of a missing time, and for texts that are neither."""
    column = table.get_column(name)
    assert isinstance(column, Texts), "the column is read as texts"

    def show(row: int) -> str:
        return show_name(column.texts[column.codes[row]])

    if (column.codes < 0).any():
        row = int(np.flatnonzero(column.codes < 0)[0])
        raise ValueError(f"{table.locate(row)}: {show_name(name)} is missing; must be a time")
    unit = ""
    if date_format is None and all(map(is_number, column.texts)):
        values = np.array(column.texts, np.str_).astype(np.float64)
    else:
        days = parse_days(column.texts, date_format or _infer_format(name, column.texts))
        if np.isnan(days).any():
            code = int(np.flatnonzero(np.isnan(days))[0])
            row = int(np.flatnonzero(column.codes == code)[0])
            raise ValueError(
                f"{table.locate(row)}: {show_name(name)} = {show(row)}: must be a date of the "
                f"format {date_format}"
            )
        months = _count_months(days)
        values, unit = (days, " days") if months is None else (months, " months")
    return RegularTimes(name, values[column.codes], unit, show, table.locate)


def _infer_format(name: str, texts: tuple[str, ...]) -> str:
    formats = find_date_formats(texts)
    if len(formats) != 1:
        problem = "fit several formats of dates" if formats else "aren't all numbers or dates"
        raise ValueError(
            f"{show_name(name)}: its values, such as {show_name(texts[0])}, {problem}; set "
            "dataset.date_format, such as %Y-%m-%d"
        )
    return formats[0]


def _count_months(days: np.ndarray) -> np.ndarray | None:
    """Return the months since 1970, float64, of dates that are all on the same day of a month, or
    on its last day, and a month or more apart; None for other dates."""
    if len(days) < 2 or (days % 1 != 0).any() or np.median(np.diff(np.sort(days))) < 28:
        return None
    dates = days.astype(np.int64).astype("datetime64[D]")
    months = dates.astype("datetime64[M]")
    is_last = (dates + np.timedelta64(1, "D")).astype("datetime64[M]") != months
    numbers = dates - months.astype("datetime64[D]")
    if not is_last.all() and len(np.unique(numbers)) > 1:
        return None
    return months.astype(np.int64).astype(np.float64)
