"""Columns of whole numbers that identify something, such as a school, and measure nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.data.tables.raw_table import RawTable

IdentifiersAs = Literal["numbers", "categories"]
FEWEST_VALUES = 11
"""The fewest different values: a smooth function fits fewer of them."""
FEWEST_ROWS_A_VALUE = 2.0
"""The fewest rows with the same value, on average."""
LEAST_SHARE = 0.05
"""The least share of the target's variance that the values explain."""
LEAST_MISSED = 0.75
"""The least share of that which a line through the neighbouring values doesn't explain."""
LEAST_F = 3.0
"""The least mean square of a value's distance from its neighbours' line, in variances of noise."""
NEIGHBOURS = 3
"""The values on each side of a value that its line goes through."""
MOST_ROWS = 100_000
"""The most rows that are looked at, evenly spaced."""
MOST_CELLS = 10_000_000
"""The most rows times classes."""


@dataclass(frozen=True)
class Identifier:
    """A column of whole numbers that identify something."""

    name: str
    values: int
    """The number of different values."""
    explained: float
    """The share of the target's variance between the values, without noise."""

    def describe(self, read_as: IdentifiersAs) -> str:
        """Return a note for the log."""
        name = show_name(self.name)
        note = (
            f"column {name}: its {self.values:,} whole numbers explain {self.explained:.0%} of the "
            f"target, and not by their order, as a school's number does; read as {read_as}"
        )
        if read_as == "numbers":
            return f"{note}, dataset.categories=[{name}] reads it as categories"
        return f"{note}, dataset.numeric=[{name}] reads it as numbers"


def find_identifiers(
    raw: RawTable, names: Sequence[str], rows: np.ndarray, labels: np.ndarray, classes: int | None
) -> Iterator[Identifier]:
    """Yield the columns `names` of whole numbers whose values explain the target, and whose order
    doesn't.

    Each value's mean target is compared with a line through the means of the values beside it. A
    measure, such as an age, has a smooth mean, so the line is near. `rows` are the training rows,
    int (n,), and `labels` their labels: one of `classes`, int (n,), or numbers (n, K) if `classes`
    is None. Numbers with a unit aren't looked at.
    """
    most_rows = min(MOST_ROWS, MOST_CELLS // (classes or 1))
    step = -(-len(rows) // max(most_rows, 1))
    rows, labels = rows[::step], labels[::step]
    if classes is not None:
        labels = labels[:, None] == np.arange(classes)
    outputs = labels.astype(np.float64)
    for name in names:
        column = raw.get_column(name)
        if not isinstance(column, np.ndarray):
            continue
        if name in raw.quantities and raw.quantities[name].unit:
            continue
        numbers = column[rows]
        present = ~np.isnan(numbers)
        if (numbers[present] == np.rint(numbers[present])).all():
            identifier = _measure(name, numbers[present], _standardise(outputs[present]))
            if identifier is not None:
                yield identifier


def _standardise(outputs: np.ndarray) -> np.ndarray:
    """Return outputs (n, K) with mean 0 and variance 1, without those that never change."""
    if not len(outputs):
        return outputs[:, :0]
    spread = outputs.std(axis=0)
    varies = spread > 1e-9 * np.abs(outputs).max(axis=0, initial=0)
    return (outputs[:, varies] - outputs[:, varies].mean(axis=0)) / spread[varies]


def _measure(name: str, numbers: np.ndarray, outputs: np.ndarray) -> Identifier | None:
    """Return a column as an identifier, if its whole numbers (n,) are one for outputs (n, K)."""
    values, codes, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    if len(values) < FEWEST_VALUES or len(numbers) < FEWEST_ROWS_A_VALUE * len(values):
        return None
    if not outputs.shape[1]:
        return None
    sums = [np.bincount(codes, weights=output, minlength=len(values)) for output in outputs.T]
    means = np.stack(sums, axis=1) / counts[:, None]
    between = float((counts[:, None] * means**2).sum())
    degrees = (len(numbers) - len(values)) * outputs.shape[1]
    noise = max(float((outputs**2).sum()) - between, 0.0) / degrees
    total = float((outputs**2).sum())
    explained = (between - noise * means.size) / total
    if explained < LEAST_SHARE:
        return None
    expected, noise_factors = _predict_from_neighbours(values, means, counts)
    distances = (means - expected) ** 2
    variances = 1 / counts + noise_factors
    missed = float((counts[:, None] * distances).sum())
    missed -= noise * outputs.shape[1] * float((counts * variances).sum())
    # Without noise, as of numbers that decide the target, any distance is beyond it.
    is_beyond_noise = float((distances / variances[:, None]).mean()) >= LEAST_F * noise
    if missed < LEAST_MISSED * explained * total or not is_beyond_noise:
        return None
    return Identifier(name, len(values), explained)


def _predict_from_neighbours(
    values: np.ndarray, means: np.ndarray, counts: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return for each of the ascending values (m,) the height (m, K) of the line that fits the
    means of `NEIGHBOURS` values on each side, weighted by their rows, and the height's variance
    (m,) by the noise of one row."""
    offsets = np.array([*range(-NEIGHBOURS, 0), *range(1, NEIGHBOURS + 1)])
    places = np.arange(len(values))[:, None] + offsets
    is_there = (places >= 0) & (places < len(values))
    places = places.clip(0, len(values) - 1)
    distances = values[places] - values[:, None]
    distances = distances / np.abs(distances).max(axis=1, keepdims=True)
    weights = counts[places] * is_there
    first = (weights * distances).sum(axis=1, keepdims=True)
    second = (weights * distances**2).sum(axis=1, keepdims=True)
    # The line's height at distance 0 is a sum of the means with these factors.
    factors = weights * (second - first * distances)
    # Neighbours that are all as far away define no line. With a NaN the column isn't an identifier.
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = factors / factors.sum(axis=1, keepdims=True)
    return (factors[..., None] * means[places]).sum(axis=1), (factors**2 / counts[places]).sum(1)
