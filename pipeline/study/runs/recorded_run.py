"""Runs under a folder, by their files: recipe, result, data, origin; and the keys that differ."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml
from pipeline.core.files.tree_diff import dotted_key, leaves
from pipeline.engine.monitors.log_lines import EVALS, METRICS
from pipeline.stages.record.descendants import Descendant, read_descendants
from pipeline.stages.record.provenance import PROVENANCE, read_provenance
from pipeline.stages.record.run_directory import FOLDERS, RECIPE, SUMMARY
from pipeline.study.runs.sampled_log import LoggedCurve, finite_number, sample_log

MAX_DEPTH = 8
"""Levels of folders that are searched."""
LEFT_OUT = ("run_dir", "cache.root", "train.resume", "hydra.")
"""Beginnings of keys about the place of a run, not about its work."""
PLACES = ("monitor.", "checkpoint.", "debug", "stages", "launch.", "autotune")
"""Beginnings of keys that decide what is recorded of a run, listed after the others."""


@dataclass(frozen=True)
class RecordedRun:
    """A run, as read from its directory."""

    name: str
    """Its directory, relative to the folder that was searched."""
    run_dir: Path
    status: str
    """done, pruned, stopped or failed; `unfinished` without a summary."""
    begun: str
    """When its first process began, ISO 8601; empty if it wasn't recorded."""
    keys: Mapping[str, Any]
    """The recipe's values by dotted key."""
    figures: Mapping[str, float]
    """Metrics and times of the summary, each one number; the macro average of those by class."""
    curves: Mapping[str, LoggedCurve]
    """Samples of what was logged, by name: `loss`, `eval accuracy`."""
    data: str
    """Fingerprints of the columns, shortened; empty if they weren't recorded."""
    commits: tuple[str, ...]
    """Commits of the code of the processes, shortened; `+` if files were changed."""
    sources: Mapping[str, str]
    """Paths of what the run began with, by relation: `resumed`, `restored`."""
    problem: str = ""
    """The files of it that could not be read, and why."""
    made: tuple[Descendant, ...] = ()
    """Things that were made of it afterwards."""


def find_runs(root: Path) -> list[Path]:
    """Find run directories below a folder, in the order of their names; links are not followed.

    Raises DataError if the folder can't be read.
    """
    if not root.is_dir():
        raise DataError(f"{root}: is no folder; runs are kept in outputs/ unless told otherwise")
    return sorted(_runs_below(root, 0))


def _runs_below(folder: Path, depth: int) -> Iterator[Path]:
    try:
        with os.scandir(folder) as scan:
            entries = list(scan)
    except OSError as error:
        if depth == 0:
            raise DataError(f"{folder}: can't be read: {error.strerror}") from error
        return
    names = {entry.name for entry in entries if entry.is_file(follow_symlinks=False)}
    is_run = RECIPE in names and bool(names & {SUMMARY, METRICS})
    if is_run:
        yield folder
    if depth == MAX_DEPTH:
        return
    skipped = set(FOLDERS) if is_run else set()
    for entry in entries:
        if entry.is_dir(follow_symlinks=False) and entry.name not in skipped:
            yield from _runs_below(Path(entry.path), depth + 1)


def read_runs(root: Path, *, curves: bool) -> list[RecordedRun]:
    """Read all runs below a folder, those that can't be read with what is wrong as `problem`.

    Raises DataError if the folder can't be read, or holds no run.
    """
    runs = [read_run(run_dir, root, curves=curves) for run_dir in find_runs(root)]
    if not runs:
        raise DataError(f"{root}: holds no run; a run directory has {RECIPE} and {METRICS}")
    return runs


def read_run(run_dir: Path, root: Path, *, curves: bool) -> RecordedRun:
    """Read a run, with samples of its logs if `curves` is set."""
    problems: list[str] = []
    recipe = _read_or(problems, RECIPE, lambda: _read_recipe(run_dir / RECIPE), {})
    summary = _read_or(problems, SUMMARY, lambda: _read_summary(run_dir / SUMMARY), {})
    processes = _read_or(problems, PROVENANCE, lambda: list(read_provenance(run_dir)), [])
    logged = _read_or(problems, METRICS, lambda: _curves(run_dir), {}) if curves else {}
    first = processes[0] if processes else {}
    name = os.path.relpath(run_dir, root)
    return RecordedRun(
        name=run_dir.resolve().name if name == "." else name,
        run_dir=run_dir,
        status=str(summary.get("status", "unfinished")),
        begun=str(first.get("begun", "")),
        keys=flat_keys(recipe),
        figures=_figures(summary),
        curves=logged,
        data=_data(first.get("data")),
        commits=tuple(dict.fromkeys(filter(None, map(_commit, processes)))),
        sources=dict(_sources(recipe, summary, str(first.get("folder", "")))),
        problem="; ".join(problems),
        made=tuple(read_descendants(run_dir)),
    )


def _read_or(problems: list[str], name: str, read: Callable[[], Any], otherwise: Any) -> Any:
    try:
        return read()
    except (DataError, OSError, ValueError) as error:
        problems.append(f"{name}: {' '.join(str(error).split())}")
        return otherwise


def _read_recipe(file: Path) -> Mapping[str, Any]:
    tree = parse_written_yaml(read_text(file, MAX_BYTES))
    if not isinstance(tree, dict):
        raise ValueError("must hold keys and values")
    return tree


def _read_summary(file: Path) -> Mapping[str, Any]:
    try:
        summary = read_json(file)
    except FileNotFoundError:
        return {}
    if not isinstance(summary, dict):
        raise ValueError("must hold a section of keys")
    return summary


def _curves(run_dir: Path) -> Mapping[str, LoggedCurve]:
    steps = run_dir / METRICS
    evaluations = run_dir / EVALS
    curves = dict(sample_log(steps)) if steps.is_file() else {}
    if evaluations.is_file():
        curves |= {f"eval {name}": curve for name, curve in sample_log(evaluations).items()}
    return curves


def flat_keys(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by dotted key; a list of plain values is one value."""
    flat: dict[str, Any] = {}
    for section, value in recipe.items():
        for where, leaf in leaves(_with_lists_as_text({section: value})):
            key = dotted_key(where)
            if not key.startswith(LEFT_OUT):
                flat[key] = leaf
    return flat


def _with_lists_as_text(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: _with_lists_as_text(value) for key, value in tree.items()}
    if isinstance(tree, list) and not any(isinstance(item, Mapping | list) for item in tree):
        return f"[{', '.join(map(str, tree))}]"
    if isinstance(tree, list):
        return [_with_lists_as_text(item) for item in tree]
    return tree


def _figures(summary: Mapping[str, Any]) -> dict[str, float]:
    metrics, times = (
        section if isinstance(section, Mapping) else {}
        for section in (summary.get("metrics"), summary.get("time"))
    )
    values = {str(name): value for name, value in metrics.items()}
    values |= {name: summary.get(name) for name in ("parameters", "steps")}
    values |= {name: times.get(name) for name in ("step_ms", "train_s")}
    numbers = {name: finite_number(value) for name, value in values.items()}
    return {name: number for name, number in numbers.items() if number is not None}


def _data(splits: Any) -> str:
    """Return the first digits of the fingerprint of each column of the training split."""
    columns = splits.get("train") if isinstance(splits, Mapping) else None
    if not isinstance(columns, Mapping):
        return ""
    digests = [
        str(c["sha256"])[:8] for c in columns.values() if isinstance(c, Mapping) and c.get("sha256")
    ]
    return " ".join(digests)


def _commit(process: Mapping[str, Any]) -> str:
    code = process.get("code")
    git = code.get("git") if isinstance(code, Mapping) else None
    if isinstance(git, Mapping) and isinstance(git.get("commit"), str):
        return git["commit"][:10] + ("+" if git.get("dirty") else "")
    return str(code["sha256"])[:10] if isinstance(code, Mapping) and "sha256" in code else ""


def _sources(
    recipe: Mapping[str, Any], summary: Mapping[str, Any], folder: str
) -> Iterator[tuple[str, str]]:
    """Yield what a run began with; relative paths start in the folder of its command."""
    resumed = summary.get("resumed_from")
    if isinstance(resumed, Mapping):
        yield "resumed", f"at step {resumed.get('step')}"
    checkpoint = recipe.get("checkpoint")
    restored = checkpoint.get("restore") if isinstance(checkpoint, Mapping) else None
    if isinstance(restored, str):
        yield "restored", os.path.normpath(os.path.join(folder, restored))


def differing_keys(runs: Sequence[RecordedRun]) -> list[str]:
    """Return the keys with several values among the runs that have them, those most varied first.

    A key that some runs lack does not differ by that alone: older versions had fewer keys.
    """
    values: dict[str, dict[str, None]] = {}
    for run in runs:
        for key, value in run.keys.items():
            values.setdefault(key, {})[repr(value)] = None
    differing = [key for key, distinct in values.items() if len(distinct) > 1]
    return sorted(differing, key=lambda key: (key.startswith(PLACES), -len(values[key]), key))


def common_keys(runs: Sequence[RecordedRun]) -> dict[str, Any]:
    """Return the keys that all runs have, with the one value that they share."""
    first: Mapping[str, Any] = runs[0].keys if runs else {}
    return {
        key: value
        for key, value in first.items()
        if all(key in run.keys and run.keys[key] == value for run in runs)
    }
