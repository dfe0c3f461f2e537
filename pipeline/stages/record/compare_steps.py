"""Comparison of two runs step by step: where their numbers first differ, and by how much."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import LogLine, read_lines

Numbers = Mapping[str, float | None]
NEAR = 1000
"""Values at most this many float32 apart are shown with the count: it may be rounding."""


@dataclass(frozen=True)
class Discrepancy:
    """A number of a step that differs between two runs; None where it was not finite."""

    step: int
    name: str
    one: float | None
    other: float | None

    @property
    def distance(self) -> float:
        """Absolute difference of the values; infinite where one was not finite."""
        if self.one is None or self.other is None:
            return math.inf
        return abs(self.other - self.one)

    def __str__(self) -> str:
        text = f"step {self.step:,}: {self.name} {_shown(self.one)} and {_shown(self.other)}"
        if self.one is None or self.other is None:
            return text
        places = abs(_place(self.other) - _place(self.one))
        near = f" ({places:,} in the last place of float32)" if places <= NEAR else ""
        return f"{text}, {self.distance:.2g} apart{near}"


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two logs of steps."""

    steps: int
    """Steps that both logs have."""
    differing: int
    """Of these, the steps that are not equal bit for bit."""
    first: Discrepancy | None
    first_loss: Discrepancy | None
    largest_loss: Discrepancy | None
    only_one: int
    only_other: int
    """Steps that only one of the logs has."""


def compare_steps(one: Path, other: Path) -> Comparison:
    """Compare two metrics.jsonl. Numbers in there read back as the float32 that was computed.

    The bounds of sinks are not compared. Raises DataError for a log that can't be read, or a line
    that is no step.
    """
    steps = differing = only_one = only_other = 0
    first = first_loss = largest = None
    for mine, yours in _pairs(one, other):
        if mine is None or yours is None:
            only_one, only_other = only_one + (yours is None), only_other + (mine is None)
            continue
        numbers = [] if mine.text == yours.text else _discrepancies(mine, yours)
        steps, differing = steps + 1, differing + bool(numbers)
        first = first or next(iter(numbers), None)
        loss = next((entry for entry in numbers if entry.name == "loss"), None)
        first_loss = first_loss or loss
        if loss and (largest is None or loss.distance > largest.distance):
            largest = loss
    return Comparison(steps, differing, first, first_loss, largest, only_one, only_other)


def _pairs(one: Path, other: Path) -> Iterator[tuple[LogLine | None, LogLine | None]]:
    """Yield the lines of each step; None where a log has no such step."""
    left, right = read_lines(one), read_lines(other)
    mine, yours = next(left, None), next(right, None)
    while mine is not None or yours is not None:
        order = _order(mine, yours)
        yield mine if order <= 0 else None, yours if order >= 0 else None
        mine = next(left, None) if order <= 0 else mine
        yours = next(right, None) if order >= 0 else yours


def _order(mine: LogLine | None, yours: LogLine | None) -> int:
    """Return -1 where `mine` is of an earlier step than `yours`, 1 of a later one, else 0."""
    if mine is None or yours is None:
        return 1 if mine is None else -1
    if mine.text == yours.text:
        return 0
    return (mine.step > yours.step) - (mine.step < yours.step)


def _discrepancies(mine: LogLine, yours: LogLine) -> list[Discrepancy]:
    first, second = mine.numbers(), yours.numbers()
    names = dict.fromkeys((*first, *second))
    pairs = {
        name: (_number_of_step(first, second, name), _number_of_step(second, first, name))
        for name in names
    }
    return [
        Discrepancy(mine.step, name, number, other)
        for name, (number, other) in pairs.items()
        if number != other
    ]


def _number_of_step(numbers: Numbers, others: Numbers, name: str) -> float | None:
    """Return a number of a step. A line has a flag only if it is set."""
    missing = 0.0 if isinstance(others.get(name), bool) else None
    number = numbers.get(name, missing)
    return None if number is None else float(number)


def _shown(value: float | None) -> str:
    return "not finite" if value is None else str(np.float32(value))


def _place(value: float) -> int:
    """Return the position of a float32 among all in ascending order, counted from zero."""
    bits = int(np.float32(value).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


MAX_NAMES = 1000
"""Names in the lines of a log: without a bound, lines of other names each would fill the memory."""


def read_arrays(log: Path) -> dict[str, np.ndarray]:
    """The numbers of a log by name, `step` among them, float64 (lines,); {} without the file.

    NaN stands for a value that is missing, is not finite or is no number; a metric with a value for
    each class has its macro average. Raises DataError for a file that is no log, and for one of
    more than `MAX_NAMES` names.
    """
    if not log.exists():
        return {}
    rows: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for line in read_lines(log):
        names |= dict.fromkeys((*line.fields, "step"))
        if len(names) > MAX_NAMES:
            raise DataError(f"{line.where}: has more than {MAX_NAMES:,} names by then; is no log")
        rows.append({**line.fields, "step": line.step})
    return {key: np.array([_number(row.get(key)) for row in rows]) for key in names}


def _number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = value.get("macro")
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
