"""Lineage: the data and the earlier runs from which runs, checkpoints and exports come."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.study.runs.recorded_run import RecordedRun

REPRODUCED = "_reproduced"
"""Suffix of the name of a run by `python -m pipeline reproduce`."""


@dataclass(frozen=True)
class Link:
    """A relation between two runs, or a run and a file."""

    source: str
    """Name of a run in the folder, or a path."""
    relation: str
    """Relation, such as `gave its weights to`, `was resumed` or `was exported as`."""
    target: str
    """Name of a run in the folder, or a path; the step for a run that was resumed."""


@dataclass(frozen=True)
class DataUse:
    """The runs that use the same data with the same map ops."""

    dataset: str
    fingerprint: str
    """Value of `RecordedRun.data`."""
    ops: str
    """Names of the map ops of the training split, in their order."""
    runs: tuple[str, ...]


def list_links(runs: Sequence[RecordedRun]) -> list[Link]:
    """Return the links of runs to their sources and exports, in the order of the runs."""
    recorded_paths = {os.path.abspath(descendant.to) for run in runs for descendant in run.made}
    folders = {os.path.abspath(run.run_dir): run for run in runs}
    return [link for run in runs for link in _list_links(run, folders, recorded_paths)]


def _list_links(
    run: RecordedRun, folders: Mapping[str, RecordedRun], recorded_paths: Collection[str]
) -> Iterator[Link]:
    """Yield the links of a run; `recorded_paths` are in the records of the runs that they use."""
    for relation, source in run.sources.items():
        if relation == "resumed":
            yield Link(run.name, "was resumed", source)
        else:
            yield Link(_name_run(source, folders), "gave its weights to", run.name)
    for descendant in run.made:
        yield Link(run.name, f"was {descendant.made} as", _name_run(descendant.to, folders))
    if run.name.endswith(REPRODUCED) and os.path.abspath(run.run_dir) not in recorded_paths:
        # The folder is named TIME_RECIPE_reproduced.
        folder = run.name.rpartition("/")[2]
        recipe = folder.partition("_")[2].removesuffix(REPRODUCED)
        yield Link(recipe, "was repeated by", run.name)


def _name_run(path: str, folders: Mapping[str, RecordedRun]) -> str:
    """Return the run that contains a path, and the rest of the path; the path if no run does."""
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        run = folders.get(str(folder))
        if run is not None:
            return run.name if folder == absolute else f"{run.name}, {absolute.relative_to(folder)}"
    return path


def list_data_uses(runs: Sequence[RecordedRun]) -> list[DataUse]:
    """Return the datasets and map ops of runs, the most used first."""
    runs_by_data: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        runs_by_data.setdefault((name_data(run), run.data, join_ops(run)), []).append(run.name)
    uses = [
        DataUse(name, fingerprint, ops, tuple(names))
        for (name, fingerprint, ops), names in runs_by_data.items()
    ]
    return sorted(uses, key=lambda use: -len(use.runs))


def join_ops(run: RecordedRun) -> str:
    """Return the names of the map ops of a run's training split, in their order."""
    return ", ".join(
        str(value)
        for key, value in run.keys.items()
        if key.startswith("dataset.train.ops") and key.endswith(".name")
    )


def name_data(run: RecordedRun) -> str:
    """Return the dataset of a run, with the name of its folder or file."""
    name = str(run.keys.get("dataset.name", "?"))
    root = run.keys.get("dataset.root") or run.keys.get("dataset.path")
    return f"{name} of {Path(str(root)).name}" if root else name
