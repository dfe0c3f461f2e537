"""Logs of steps, metrics.jsonl: the comparison of two logs, and a log as arrays."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import LogLine, parse_line, read_lines
from pipeline.engine.monitors.metrics_log import metrics_lines
from pipeline.training.state import FLAGS
from pipeline.training.telemetry import Telemetry

MAX_PLACES = 1000
"""Largest distance that is also shown as a number of float32 numbers: it may be rounding."""
MAX_NAMES = 1000
"""Most names of numbers in a log, so that lines with ever new names don't fill the memory."""


@dataclass(frozen=True)
class Discrepancy:
    """A number of a step that differs between two logs.

    It is None if a log lacks it, and infinite for any number that isn't finite.
    """

    step: int
    name: str
    one: float | None
    """The number in the first log."""
    other: float | None
    """The number in the second log."""

    @property
    def distance(self) -> float:
        """Absolute difference of the values; infinite if one is missing or not finite."""
        return math.inf if self.one is None or self.other is None else abs(self.other - self.one)

    def __str__(self) -> str:
        numbers = f"{_format_number(self.one)} and {_format_number(self.other)}"
        text = f"step {self.step:,}: {self.name} {numbers}"
        if self.one is None or self.other is None or math.isinf(self.distance):
            return text
        places = abs(_find_float_position(self.other) - _find_float_position(self.one))
        count = f" ({places:,} in the last place of float32)" if places <= MAX_PLACES else ""
        return f"{text}, {self.distance:.2g} apart{count}"


def _format_number(value: float | None) -> str:
    if value is None:
        return "missing"
    return str(np.float32(value)) if math.isfinite(value) else "not finite"


def _find_float_position(value: float) -> int:
    """Return the position of a float32 among all in order: 0 for zero, negative below it."""
    bits = int(np.float32(value).view(np.int32))
    return bits if bits >= 0 else -(bits & 0x7FFFFFFF)


@dataclass(frozen=True)
class Comparison:
    """Result of comparing two logs of steps."""

    steps: int
    """Number of steps in both logs."""
    differing: int
    """Number of these steps whose numbers aren't equal bit for bit."""
    first: Discrepancy | None
    first_loss: Discrepancy | None
    largest_loss: Discrepancy | None
    """The discrepancy of a loss with the largest distance."""
    only_one: int
    """Number of steps that only the first log has."""
    only_other: int
    """Number of steps that only the second log has."""


def compare_steps(a: Path, b: Path) -> Comparison:
    """Compare two metrics.jsonl. Numbers are read as the float32 that were computed.

    The bounds of sinks aren't compared. Raises DataError for a log that can't be read as steps.
    """
    steps = differing = only_one = only_other = 0
    first = first_loss = largest_loss = None
    for line_a, line_b in _pair_lines(a, b):
        if line_b is None:
            only_one += 1
            continue
        if line_a is None:
            only_other += 1
            continue
        steps += 1
        if line_a.text == line_b.text:
            continue
        discrepancies = _find_discrepancies(line_a, line_b)
        if not discrepancies:
            continue
        differing += 1
        first = first or discrepancies[0]
        loss = next((entry for entry in discrepancies if entry.name == "loss"), None)
        first_loss = first_loss or loss
        if loss and (largest_loss is None or loss.distance > largest_loss.distance):
            largest_loss = loss
    return Comparison(steps, differing, first, first_loss, largest_loss, only_one, only_other)


def find_discrepancy(lines: Iterable[LogLine], telemetry: Telemetry) -> Discrepancy | None:
    """Return the first number of a log that differs from the telemetry of the same steps, bit for
    bit; None if all are the same. A step that the log lacks differs in its loss.

    Columns that the host measured, such as speeds, aren't in the telemetry of a repeated step, and
    aren't compared. Raises DataError for numbers that no step has.
    """
    end = telemetry.start + len(telemetry)
    logged = {line.step: line for line in lines if telemetry.start < line.step <= end}
    for text in metrics_lines([telemetry], None).splitlines():
        line = parse_line(text.encode(), "telemetry")
        names = line.numbers()
        if line.step not in logged:
            return Discrepancy(line.step, "loss", None, names["loss"])
        for discrepancy in _find_discrepancies(logged[line.step], line):
            if discrepancy.name in names or discrepancy.name in FLAGS:
                return discrepancy
    return None


def _pair_lines(a: Path, b: Path) -> Iterator[tuple[LogLine | None, LogLine | None]]:
    """Yield the lines of each step in both logs; None if a log lacks the step."""
    lines_a = read_lines(a)
    lines_b = read_lines(b)
    line_a = next(lines_a, None)
    line_b = next(lines_b, None)
    while line_a is not None or line_b is not None:
        has_a = line_b is None or (line_a is not None and line_a.step <= line_b.step)
        has_b = line_a is None or (line_b is not None and line_b.step <= line_a.step)
        yield line_a if has_a else None, line_b if has_b else None
        line_a = next(lines_a, None) if has_a else line_a
        line_b = next(lines_b, None) if has_b else line_b


def _find_discrepancies(line_a: LogLine, line_b: LogLine) -> list[Discrepancy]:
    """Return the numbers that differ between two lines of a step."""
    numbers_a = line_a.numbers()
    numbers_b = line_b.numbers()

    def read(numbers: Mapping[str, float | None], name: str) -> float | None:
        # A line without a flag means that the flag isn't set.
        is_flag = isinstance(numbers_a.get(name), bool) or isinstance(numbers_b.get(name), bool)
        if name not in numbers:
            return 0.0 if is_flag else None
        number = numbers[name]
        return math.inf if number is None else float(number)

    discrepancies = []
    for name in dict.fromkeys((*numbers_a, *numbers_b)):
        one = read(numbers_a, name)
        other = read(numbers_b, name)
        if one != other:
            discrepancies.append(Discrepancy(line_a.step, name, one, other))
    return discrepancies


def read_arrays(log: Path) -> dict[str, np.ndarray]:
    """Return the numbers of a log and `step` by name, float64 (lines,); {} without a file.

    NaN stands for a value that is missing, isn't finite or isn't a number. A metric with a value
    for each class becomes its macro average. Raises DataError for a file that isn't a log, and for
    a log with more than `MAX_NAMES` names.
    """
    if not log.exists():
        return {}
    rows: list[dict[str, Any]] = []
    names: dict[str, None] = {}
    for line in read_lines(log):
        names |= dict.fromkeys((*line.fields, "step"))
        if len(names) > MAX_NAMES:
            raise DataError(f"{line.where}: the log must have at most {MAX_NAMES:,} names")
        rows.append({**line.fields, "step": line.step})
    return {key: np.array([_to_number(row.get(key)) for row in rows]) for key in names}


def _to_number(value: Any) -> float:
    if isinstance(value, Mapping):
        value = value.get("macro")
    try:
        return float(value) if isinstance(value, int | float) else float("nan")
    except OverflowError:
        return float("nan")
