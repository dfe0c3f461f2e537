"""Labelled series of several lengths as they are read from a file, and their common length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.core.registry import MAX_FLOAT


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
        names = set(self.labels)
        try:
            return tuple(sorted(names, key=float))
        except ValueError:
            return tuple(sorted(names))

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
            try:
                numbers[row] = float(label)
            except ValueError:
                numbers[row] = np.nan
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
