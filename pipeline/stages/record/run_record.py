"""Record of a run: its recipe, summary and processes; and the differences of two records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.tree_diff import Difference, find_value, list_differences
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.recorded_recipe import read_recorded_recipe
from pipeline.stages.record.run_directory import SUMMARY, require_run_dir

ENVIRONMENT = ("versions", "machine", "settings", "numerics")
TIMES = ("step_ms", "median_step_ms", "train_s", "first_step_s")
"""Times of a summary that are compared, besides all speeds (names that end in `_per_s`)."""


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
    code = process.get("code")
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
        **{name: summary.get(name) for name in ("reason", "steps", "passes", "parameters")},
        "metrics": numbers,
        "time": {name: times[name] for name in times if name in TIMES or name.endswith("_per_s")},
    }
