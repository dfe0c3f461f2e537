"""Record of a run: its recipe, summary and processes; and two records side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import DataError, printable
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.name_text import show_name
from pipeline.core.files.tree_diff import Difference, find_value, list_differences
from pipeline.core.files.value_text import show
from pipeline.stages.record.compare_steps import Comparison
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.recorded_recipe import read_recorded_recipe
from pipeline.stages.record.run_directory import SUMMARY, require_run_dir

ENVIRONMENT = ("versions", "machine", "settings", "numerics")
TIMES = ("step_ms", "median_step_ms", "train_s", "first_step_s")
"""Times of a summary that are compared, besides all speeds (names that end in `_per_s`)."""
SECTION_WIDTH = 12
"""Width of the column of section names, in characters."""
DIGEST_LENGTH = 12
"""Number of digits of a checksum that are shown."""
NOT_RECORDED = "not kept by both runs"


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
