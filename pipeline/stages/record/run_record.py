"""Record of a run, read from its directory, and the differences of two records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.tree_diff import Difference, differences
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.recorded_recipe import read_recorded_recipe
from pipeline.stages.record.run_directory import RECIPE, SUMMARY, run_of

ENVIRONMENT = ("versions", "machine", "settings", "numerics")
TIMES = ("step_ms", "median_step_ms", "train_s", "first_step_s")
"""Times of a summary that are compared, with all speeds, such as images_per_s."""


@dataclass(frozen=True)
class RunRecord:
    """A run as it was kept; `recipe` has defaults for keys that are newer than the run."""

    run_dir: Path
    recipe: Mapping[str, Any]
    summary: Mapping[str, Any]
    """Empty for a run that was killed."""
    processes: Sequence[Mapping[str, Any]]
    """The processes that worked on it; none if their file was removed."""

    @property
    def status(self) -> str:
        """done, stopped or failed; killed where there is no summary."""
        return str(self.summary.get("status", "killed"))

    @property
    def made_by(self) -> Mapping[str, Any]:
        """The process that began the run; those that resumed it are later in `processes`."""
        return self.processes[0] if self.processes else {}


def read_record(folder: Path) -> RunRecord:
    """Read the record of a run directory, its checkpoints folder or one checkpoint in there.

    Raises DataError where it is none of these, or can't be read.
    """
    run_dir = run_of(folder)
    if run_dir is None:
        raise DataError(f"{folder}: is no run directory; it holds no {RECIPE}")
    recipe, summary = read_recorded_recipe(run_dir), _read_summary(run_dir)
    return RunRecord(run_dir, recipe, summary, read_provenance(run_dir))


def _read_summary(run_dir: Path) -> Mapping[str, Any]:
    file = run_dir / SUMMARY
    try:
        summary = read_json(file)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {error}") from error
    if not isinstance(summary, dict):
        raise DataError(f"{file}: must hold a section of keys")
    return summary


def compare_origins(one: RunRecord, other: RunRecord) -> dict[str, list[Difference] | None]:
    """Compare recipe, data, code and environment; None for a section that a run has not kept.

    By the provenance of the process that began each run.
    """
    sections: dict[str, list[Difference] | None] = {"config": differences(one.recipe, other.recipe)}
    first, second = _origin(one), _origin(other)
    for section in ("data", "code", "environment"):
        known = bool(one.processes and other.processes)
        sections[section] = differences(first[section], second[section]) if known else None
    return sections


def _origin(record: RunRecord) -> dict[str, Any]:
    made_by = record.made_by
    code = made_by.get("code")
    return {
        "data": made_by.get("data"),
        "code": _with_one_list_of_changes(code) if isinstance(code, Mapping) else code,
        "environment": {name: made_by.get(name) for name in ENVIRONMENT},
    }


def _with_one_list_of_changes(code: Mapping[str, Any]) -> Mapping[str, Any]:
    git = code.get("git")
    if not isinstance(git, Mapping) or not isinstance(git.get("changed"), list):
        return code
    return {**code, "git": {**git, "changed": ", ".join(map(str, git["changed"]))}}


def compare_outcomes(one: RunRecord, other: RunRecord) -> list[Difference]:
    """Compare the outcomes of two runs: status, lengths, metrics, speeds."""
    return differences(_outcome(one), _outcome(other))


def _outcome(record: RunRecord) -> dict[str, Any]:
    summary = record.summary
    metrics, times = summary.get("metrics"), summary.get("time")
    return {
        "status": record.status,
        **{name: summary.get(name) for name in ("reason", "steps", "passes", "parameters")},
        "metrics": _single_numbers(metrics) if isinstance(metrics, Mapping) else {},
        "time": _compared(times) if isinstance(times, Mapping) else {},
    }


def _compared(times: Mapping[str, Any]) -> dict[str, Any]:
    """Return the times that are compared."""
    return {name: times[name] for name in times if name in TIMES or name.endswith("_per_s")}


def _single_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return metrics without those of each class; of precision, recall and F1 the macro average."""
    macros = {k: v.get("macro") if isinstance(v, Mapping) else v for k, v in metrics.items()}
    return {name: value for name, value in macros.items() if not isinstance(value, list)}
