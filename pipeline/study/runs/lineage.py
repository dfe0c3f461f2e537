"""Lineage: which data and which earlier run a run, a checkpoint or an export came from."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.study.runs.recorded_run import RecordedRun

REPRODUCED = "_reproduced"
"""End of the name of a run that `python -m pipeline reproduce` made."""


@dataclass(frozen=True)
class Link:
    """The origin of one thing in another."""

    source: str
    """Name of a run here, or a path."""
    relation: str
    """`gave its weights to`, `was resumed`, `was exported as`."""
    target: str
    """Name of a run here, or a path; of a run that was resumed, the step."""


@dataclass(frozen=True)
class DataUse:
    """Runs on the same data with the same map ops."""

    dataset: str
    fingerprint: str
    ops: str
    """Names of the map ops of the training split, in their order."""
    runs: tuple[str, ...]


def links_of(runs: Sequence[RecordedRun]) -> list[Link]:
    """Return what the runs began with, in the order of the runs."""
    noted = {os.path.abspath(made.to) for run in runs for made in run.made}
    folders = {os.path.abspath(run.run_dir): run for run in runs}
    return [link for run in runs for link in _links(run, folders, noted)]


def _links(
    run: RecordedRun, folders: Mapping[str, RecordedRun], noted: Collection[str]
) -> Iterator[Link]:
    for relation, source in run.sources.items():
        if relation == "resumed":
            yield Link(run.name, "was resumed", source)
        else:
            yield Link(_name_of(source, folders), "gave its weights to", run.name)
    for made in run.made:
        yield Link(run.name, f"was {made.made} as", _name_of(made.to, folders))
    if run.name.endswith(REPRODUCED) and os.path.abspath(run.run_dir) not in noted:
        recipe = run.name.rpartition("/")[2].partition("_")[2].removesuffix(REPRODUCED)
        yield Link(recipe, "was repeated by", run.name)


def _name_of(path: str, folders: Mapping[str, RecordedRun]) -> str:
    """Return the name of the run that contains a path; else the path."""
    where = Path(os.path.abspath(path))
    for folder in (where, *where.parents):
        run = folders.get(str(folder))
        if run is not None:
            inside = os.path.relpath(where, folder)
            return run.name if inside == "." else f"{run.name}, {inside}"
    return path


def uses_of_data(runs: Sequence[RecordedRun]) -> list[DataUse]:
    """Return the data sets with the map ops that runs had of them, the most used first."""
    runs_by_data: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        runs_by_data.setdefault((data_of(run), run.data, ops_of(run)), []).append(run.name)
    uses = [
        DataUse(name, fingerprint, ops, tuple(names))
        for (name, fingerprint, ops), names in runs_by_data.items()
    ]
    return sorted(uses, key=lambda use: -len(use.runs))


def ops_of(run: RecordedRun) -> str:
    """Return the names of the map ops of a run's training split, in their order."""
    keys = run.keys.items()
    ops = [k for k in keys if k[0].startswith("dataset.train.ops") and k[0].endswith(".name")]
    return ", ".join(str(value) for _, value in ops)


def data_of(run: RecordedRun) -> str:
    """Return the dataset of a run, with the folder or file that it was read from."""
    name = str(run.keys.get("dataset.name", "?"))
    root = run.keys.get("dataset.root") or run.keys.get("dataset.path")
    return f"{name} of {Path(str(root)).name}" if root else name
