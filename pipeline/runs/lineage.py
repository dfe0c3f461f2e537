"""Lineage: which data and which earlier run a run, a checkpoint or an export came from."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.runs.kept_run import KeptRun

REPRODUCED = "_reproduced"
"""End of the name of a run that `python -m pipeline reproduce` made."""


@dataclass(frozen=True)
class Link:
    """The origin of one thing in another."""

    source: str
    """Name of a run here, or a path."""
    relation: str
    """`weights of`, `same recipe as`, `goes on`."""
    target: str
    """Name of a run here."""


@dataclass(frozen=True)
class DataUse:
    """Runs on the same data with the same map ops."""

    dataset: str
    fingerprint: str
    ops: str
    """Names of the map ops of the training split, in their order."""
    runs: tuple[str, ...]


def links_of(runs: Sequence[KeptRun]) -> list[Link]:
    """Return what the runs began with, in the order of the runs."""
    return [link for run in runs for link in _links(run, runs)]


def _links(run: KeptRun, runs: Sequence[KeptRun]) -> Iterator[Link]:
    for relation, source in run.sources.items():
        if relation == "resumed":
            yield Link(f"{run.name}, {source}", "goes on as", run.name)
        else:
            yield Link(_name_of(source, runs), "gave its weights to", run.name)
    if run.name.endswith(REPRODUCED):
        recipe = run.name.rpartition("/")[2].partition("_")[2].removesuffix(REPRODUCED)
        yield Link(recipe, "was repeated by", run.name)


def _name_of(path: str, runs: Sequence[KeptRun]) -> str:
    """Return the name of the run that a path lies in; the path where it lies in none."""
    where = os.path.abspath(path)
    for run in runs:
        folder = os.path.abspath(run.run_dir)
        if where == folder or where.startswith(folder + os.sep):
            inside = os.path.relpath(where, folder)
            return run.name if inside == "." else f"{run.name}, {inside}"
    return path


def uses_of_data(runs: Sequence[KeptRun]) -> list[DataUse]:
    """Return the data sets with the map ops that runs had of them, the most used first."""
    found: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        ops = [
            str(value)
            for key, value in run.keys.items()
            if key.startswith("dataset.train.ops") and key.endswith(".name")
        ]
        at = (_dataset(run), run.data, ", ".join(ops))
        found.setdefault(at, []).append(run.name)
    uses = [DataUse(*at, tuple(names)) for at, names in found.items()]
    return sorted(uses, key=lambda use: -len(use.runs))


def _dataset(run: KeptRun) -> str:
    name = str(run.keys.get("dataset.name", "?"))
    root = run.keys.get("dataset.root") or run.keys.get("dataset.path")
    return f"{name} of {Path(str(root)).name}" if root else name
