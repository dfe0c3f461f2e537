"""Records of runs, two side by side, and their logs of steps as arrays, compared.

A record is recipe, summary and processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import DataError, printable
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.name_text import show_name
from pipeline.core.files.tree_diff import Difference, find_value, list_differences
from pipeline.core.files.value_text import show
from pipeline.engine.monitors.log_lines import LogLine, parse_line, read_lines
from pipeline.engine.monitors.metrics_log import metrics_lines
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.recorded_recipe import read_recorded_recipe
from pipeline.stages.record.run_directory import SUMMARY, require_run_dir
from pipeline.training.state import FLAGS
from pipeline.training.telemetry import Telemetry

ENVIRONMENT = ("versions", "machine", "settings", "numerics")
TIMES = ("step_ms", "median_step_ms", "train_s", "first_step_s")
"""Times of a summary that are compared, besides all speeds (names that end in `_per_s`)."""
SECTION_WIDTH = 12
"""Width of the column of section names, in characters."""
DIGEST_LENGTH = 12
"""Number of digits of a checksum that are shown."""
NOT_RECORDED = "not kept by both runs"
MAX_PLACES = 1000
"""Largest distance that is also shown as a number of float32 numbers: it may be rounding."""
MAX_NAMES = 1000
"""Most names of numbers in a log, so that lines with ever new names don't fill the memory."""


@dataclass(frozen=True)
class RunRecord:
    """The record of a run; `recipe` has defaults for keys that are newer than the run."""

    run_dir: Path
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    """Content of summary.json; empty for a run that was killed."""
    processes: Sequence[Mapping[str, Any]]
    """Processes in provenance.json, oldest first; empty if the file was removed."""

    @property
    def status(self) -> str:
        """The status in the summary; `killed` without a summary."""
        return str(self.summary.get("status", "killed"))

    @property
    def first_process(self) -> Mapping[str, Any]:
        """The process that began the run; {} if unknown."""
        return self.processes[0] if self.processes else {}


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run directory, its checkpoints folder or one checkpoint in there.

    Raises DataError if `folder` isn't one of these, or can't be read.
    """
    run_dir = require_run_dir(folder)
    recipe = read_recorded_recipe(run_dir)
    file = run_dir / SUMMARY
    try:
        summary = read_json(file)
    except FileNotFoundError:
        summary = {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {error}") from error
    if not isinstance(summary, dict):
        raise DataError(f"{file}: must hold a section of keys")
    return RunRecord(run_dir, recipe, summary, read_provenance(run_dir))


def compare_origins(a: RunRecord, b: RunRecord) -> dict[str, list[Difference] | None]:
    """Compare the recipes of two runs, and data, code and environment of their first processes.

    The last three are None if a run has no provenance.
    """
    sections: dict[str, list[Difference] | None] = {"config": list_differences(a.recipe, b.recipe)}
    origin_a = _make_origin(a)
    origin_b = _make_origin(b)
    are_recorded = bool(a.processes and b.processes)
    for section in ("data", "code", "environment"):
        changes = list_differences(origin_a[section], origin_b[section]) if are_recorded else None
        sections[section] = changes
    return sections


def _make_origin(record: RunRecord) -> dict[str, Any]:
    """Return the sections of provenance to compare; the list of changed files becomes a text."""
    process = record.first_process
    code: Any = process.get("code")
    changed = find_value(code, ("git", "changed"))
    if isinstance(changed, list):
        code = {**code, "git": {**code["git"], "changed": ", ".join(map(str, changed))}}
    environment = {name: process.get(name) for name in ENVIRONMENT}
    return {"data": process.get("data"), "code": code, "environment": environment}


def compare_outcomes(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Compare the outcomes of two runs: status, lengths, metrics, speeds."""
    return list_differences(_make_outcome(a), _make_outcome(b))


def _make_outcome(record: RunRecord) -> dict[str, Any]:
    summary = record.summary
    metrics = summary.get("metrics")
    times = summary.get("time")
    metrics = metrics if isinstance(metrics, Mapping) else {}
    times = times if isinstance(times, Mapping) else {}
    # Precision, recall and F1 are macro averages; metrics of each class are left out.
    numbers = {
        name: value.get("macro") if isinstance(value, Mapping) else value
        for name, value in metrics.items()
        if not isinstance(value, list)
    }
    return {
        "status": record.status,
        **{name: summary.get(name) for name in ("reason", "steps", "epochs", "parameters")},
        "metrics": numbers,
        "time": {name: times[name] for name in times if name in TIMES or name.endswith("_per_s")},
    }


class SideBySide:
    """Printer of the runs A and B: a line for each run, then a section for each comparison."""

    def __init__(self, a: RunRecord, b: RunRecord) -> None:
        self._runs = a, b
        self._console = Console(highlight=False, markup=False)
        for letter, record in zip("AB", self._runs, strict=True):
            steps = record.summary.get("steps")
            steps_text = f", {steps:,} steps" if type(steps) is int else ""
            count = len(record.processes)
            several = f", by {count} processes" if count > 1 else ""
            line = f"{letter}  {record.run_dir}: {show_name(record.status)}{steps_text}{several}"
            self._console.print(printable(line), soft_wrap=True)

    def show_text(self, section: str, text: str) -> None:
        """Print a section of one line."""
        self._console.print(printable(f"{section:<{SECTION_WIDTH}} {text}"), soft_wrap=True)

    def show_differences(self, section: str, differences: Sequence[Difference] | None) -> None:
        """Print a table of differences; a line if there are none, or if they are unknown (None)."""
        if not differences:
            self.show_text(section, NOT_RECORDED if differences is None else "the same")
            return
        table = Table(section, "A", "B", "B against A", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for difference in differences:
            a = difference.value
            b = difference.other_value
            table.add_row(
                show_name(difference.key), _format_cell(a), _format_cell(b), _format_change(a, b)
            )
        self._console.print(table)

    def show_origins(self) -> None:
        """Print the differences of recipe, data, code and environment, a section for each."""
        for section, differences in compare_origins(*self._runs).items():
            self.show_differences(section, differences)

    def show_steps(self, comparison: Comparison | None) -> None:
        """Print the comparison of two logs of steps; None if a log is missing."""
        self.show_text("steps", NOT_RECORDED if comparison is None else _format_steps(comparison))


def differences_to_dicts(differences: Sequence[Difference] | None) -> list[dict[str, Any]] | None:
    """Return the differences for JSON; None if they are unknown."""
    if differences is None:
        return None
    return [
        {"key": difference.key, "a": difference.value, "b": difference.other_value}
        for difference in differences
    ]


def _format_steps(comparison: Comparison) -> str:
    num_extra = {"A": comparison.only_one, "B": comparison.only_other}
    extra = [f"{letter} has {steps:,} more" for letter, steps in num_extra.items() if steps]
    if comparison.first is None:
        return "; ".join([f"{comparison.steps:,} are the same, bit for bit", *extra])
    parts = [f"{comparison.differing:,} of {comparison.steps:,} differ, from {comparison.first}"]
    if comparison.first_loss not in (None, comparison.first):
        parts.append(f"the losses from {comparison.first_loss}")
    if comparison.largest_loss not in (None, comparison.first_loss):
        parts.append(f"furthest apart at {comparison.largest_loss}")
    return "; ".join([*parts, *extra])


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():
        return value[:DIGEST_LENGTH]  # of a commit or a SHA-256
    return f"{value:,.6g}" if isinstance(value, float) else show(value)


def _format_change(a: Any, b: Any) -> str:
    """Return the relative change from `a` to `b`; "" if either isn't a number, or `a` is 0."""
    for value in (a, b):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return ""
    try:
        return f"{b / a - 1:+.2%}" if a else ""
    except OverflowError:  # whole numbers beyond any float
        return ""


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
