"""Logs of steps: two compared step by step, or one as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import LogLine, read_lines

NEAR = 1000
"""Values at most this many float32 apart are shown with the count: it may be rounding."""
MAX_NAMES = 1000
"""Names in the lines of a log: without a bound, lines of other names each would fill the memory."""


@dataclass(frozen=True)
class Discrepancy:
    """A number of a step that differs between two runs; None if it was not finite."""

    step: int
    name: str
    one: float | None
    other: float | None

    @property
    def distance(self) -> float:
        """Absolute difference of the values; infinite if one was not finite."""
        if self.one is None or self.other is None:
            return math.inf
        return abs(self.other - self.one)

    def __str__(self) -> str:
        values = (self.one, self.other)
        texts = ["not finite" if value is None else str(np.float32(value)) for value in values]
        text = f"step {self.step:,}: {self.name} {' and '.join(texts)}"
        if self.one is None or self.other is None:
            return text
        places = abs(_float_position(self.other) - _float_position(self.one))
        near = f" ({places:,} in the last place of float32)" if places <= NEAR else ""
        return f"{text}, {self.distance:.2g} apart{near}"


def _float_position(value: float) -> int:
    """Return the position of a float32 among all in ascending order, counted from zero."""
    bits = int(np.float32(value).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


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


def compare_steps(a: Path, b: Path) -> Comparison:
    """Compare two metrics.jsonl. Numbers in there read back as the float32 that was computed.

    The bounds of sinks are not compared. Raises DataError for a log that can't be read, or a line
    that isn't a step.
    """
    steps = differing = only_one = only_other = 0
    first = first_loss = largest = None
    for line_a, line_b in _pair_lines(a, b):
        if line_a is None or line_b is None:
            only_one += line_b is None
            only_other += line_a is None
            continue
        numbers = [] if line_a.text == line_b.text else _find_discrepancies(line_a, line_b)
        steps += 1
        differing += bool(numbers)
        first = first or next(iter(numbers), None)
        loss = next((entry for entry in numbers if entry.name == "loss"), None)
        first_loss = first_loss or loss
        if loss and (largest is None or loss.distance > largest.distance):
            largest = loss
    return Comparison(steps, differing, first, first_loss, largest, only_one, only_other)


def _pair_lines(a: Path, b: Path) -> Iterator[tuple[LogLine | None, LogLine | None]]:
    """Yield the lines of each step; None if a log has no such step."""
    lines_a = read_lines(a)
    lines_b = read_lines(b)
    line_a = next(lines_a, None)
    line_b = next(lines_b, None)
    while line_a is not None or line_b is not None:
        if line_a is None or line_b is None:
            order = 1 if line_a is None else -1
        else:
            order = (line_a.step > line_b.step) - (line_a.step < line_b.step)
        yield line_a if order <= 0 else None, line_b if order >= 0 else None
        line_a = next(lines_a, None) if order <= 0 else line_a
        line_b = next(lines_b, None) if order >= 0 else line_b


def _find_discrepancies(line_a: LogLine, line_b: LogLine) -> list[Discrepancy]:
    numbers_a = line_a.numbers()
    numbers_b = line_b.numbers()

    def read(numbers: Mapping[str, float | None], name: str) -> float | None:
        # A line has a flag only if it is set.
        is_flag = isinstance(numbers_a.get(name), bool) or isinstance(numbers_b.get(name), bool)
        number = numbers.get(name, 0.0 if is_flag else None)
        return None if number is None else float(number)

    names = dict.fromkeys((*numbers_a, *numbers_b))
    pairs = {name: (read(numbers_a, name), read(numbers_b, name)) for name in names}
    return [Discrepancy(line_a.step, name, a, b) for name, (a, b) in pairs.items() if a != b]


def read_arrays(log: Path) -> dict[str, np.ndarray]:
    """Return the numbers of a log by name, `step` among them, float64 (lines,); {} without a file.

    NaN stands for a value that is missing, isn't finite or isn't a number; a metric with a value
    for each class has its macro average. Raises DataError for a file that isn't a log, and for one
    of more than `MAX_NAMES` names.
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
    return {key: np.array([_to_number(row.get(key)) for row in rows]) for key in names}


def _to_number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = value.get("macro")
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
