"""Promises of a replay: what must be as it was in the run, and what has changed since."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.tree_diff import find_value
from pipeline.core.files.value_text import show
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe
from pipeline.stages.build import fingerprint_rate_files
from pipeline.stages.compile import MACHINE_KEYS
from pipeline.stages.record.continuity import (
    FORK,
    compare_settings,
    describe_changed_software,
    find_changed_data,
    find_changed_plugins,
)
from pipeline.stages.record.environment import describe_process, fingerprint_columns
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.run_directory import read_outcome
from pipeline.stages.record.summary import list_versions

BATCH_DATA = ("train", "learning rates")
"""Data in provenance.json that decide steps; the evaluation's data don't."""


def describe_changed_data(opened: OpenedRecipe, run_dir: Path) -> str | None:
    """Describe what differs between the run's training data and the data now; None if equal.

    Runs whose provenance is gone are trusted. Raises DataError if provenance.json is damaged or a
    sample can't be read.
    """
    recipe = opened.recipe
    recorded = [
        {**process, "data": {name: data[name] for name in BATCH_DATA if name in data}}
        for process in read_provenance(run_dir)
        if isinstance(data := process.get("data"), Mapping)
    ]
    current: dict[str, Any] = {"train": _as_trees(fingerprint_columns(opened.dataset.train))}
    if rate_files := fingerprint_rate_files(recipe.train):
        current["learning rates"] = rate_files
    changes = find_changed_data(recorded, current)
    if not changes:
        return None
    files = [f"dataset.{key} = {path}" for key, path in _iterate_paths(recipe.dataset.model_dump())]
    names = f" ({', '.join(files)})" if files else ""
    return f"the data have changed since the run was trained{names}: {'; '.join(changes)}"


def _as_trees(fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    return {column: vars(fingerprint) for column, fingerprint in fingerprints.items()}


def _iterate_paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the paths in a section of a recipe with their keys."""
    if isinstance(value, Path):
        yield key, value
    entries: Any = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    for name, entry in entries:
        yield from _iterate_paths(entry, f"{key}.{name}" if key else str(name))


def list_changed_causes(opened: OpenedRecipe, run_dir: Path) -> list[str]:
    """List what may make a replay round differently than the run did, each with both values.

    These are versions and code, the machine, settings, plug-ins, and what a run does that a replay
    doesn't: callbacks, rollbacks and the schedule before a resume with another length.
    """
    recipe = opened.recipe
    backend = opened.backend
    versions = list_versions(backend.describe())
    current = describe_process(recipe.seed, versions, backend.device, {})
    causes = []
    try:
        processes = read_provenance(run_dir)
    except DataError:
        processes = []
    if not processes:
        causes.append("its provenance.json is gone")
    if software := describe_changed_software(processes, current):
        causes.append(f"other software ({software})")
    machine = processes[0].get("machine") if processes else None
    if isinstance(machine, Mapping):
        causes += [
            f"another {name} ({show_name(str(machine[name]))} -> {current.machine[name]})"
            for name in MACHINE_KEYS
            if name in machine and machine[name] != current.machine[name]
        ]
    causes += [f"another setting ({line})" for line in compare_settings(processes, current)[0]]
    causes += [f"another plug-in ({line})" for line in find_changed_plugins(processes, current)]
    forks = [process[FORK] for process in processes if isinstance(process.get(FORK), Mapping)]
    if forks:
        origin = show_name(str(forks[-1].get("run")))
        step = show(forks[-1].get("step"))
        causes.append(f"it is a fork, whose steps up to {step} are those of {origin}")
    elif len(processes) > 1:
        causes.append("the run was resumed, perhaps with another length")
    if recipe.train.callbacks:
        causes.append("its callbacks aren't called")
    if find_value(read_outcome(run_dir), ("bad_steps", "rollbacks")):
        causes.append("it went back after a non-finite step")
    return causes


def read_step_ms(run_dir: Path) -> float | None:
    """Return the milliseconds of a step of the run; None if it was killed."""
    value = find_value(read_outcome(run_dir), ("time", "step_ms"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None
