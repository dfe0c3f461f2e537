"""Fork of a run: the steps that two recipes have in common, and a run directory with logs, state
and recipe, from which a run trains on."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    MANIFEST,
    META,
    list_saved_steps,
    make_checkpoint_path,
    make_draft_path,
)
from pipeline.checkpoint.checkpoint_folder import RECIPE as SAVED_RECIPE
from pipeline.checkpoint.checkpointer import Checkpoints, Retention
from pipeline.checkpoint.manifest import DamagedError, read_json, write_manifest
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import (
    commit,
    convert_write_errors,
    format_json,
    write_whole,
)
from pipeline.core.files.folder_write import remove_if_failed
from pipeline.core.files.tree_diff import Difference
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.monitors.log_lines import EVALS, METRICS, SCALARS, LogLine, read_lines
from pipeline.engine.schedule import Event, is_due
from pipeline.stages.record.continuity import FORK
from pipeline.stages.record.provenance import PROVENANCE, read_provenance
from pipeline.stages.record.recorded_recipe import LENGTH, hash_recipe, write_recipe
from pipeline.stages.record.run_directory import LOWERINGS, PLAN, RECIPE, lock_run
from pipeline.stages.runner.open_training import make_early_stop
from pipeline.training.state import TrainState

SCHEDULE = ("train", "schedule")
RATE_PATHS = (*LENGTH, ("train", "planned_for"), SCHEDULE)
"""Keys that decide a step only by the table of learning rates."""
FILES = (METRICS, EVALS, SCALARS, LOWERINGS, PLAN, PROVENANCE, FOLDER, RECIPE)
"""Files and folders that `write_fork` writes."""


@dataclass(frozen=True, eq=False)
class RateTable:
    """The learning rates of the updates of a run. A step has at most one update, also in several
    microbatches."""

    rates: np.ndarray
    """float32 (updates,), or (updates, columns)."""
    total: int
    """Steps of the run."""


def changes_only_rates(change: Difference) -> bool:
    """Return whether a key decides steps only by the table of learning rates."""
    return any(change.path[: len(path)] == path for path in RATE_PATHS)


def count_equal_steps(left: RateTable, right: RateTable) -> int:
    """Return the number of steps with the same learning rates from the start."""
    total = min(left.total, right.total)
    if left.rates.shape[1:] != right.rates.shape[1:]:
        return 0
    length = min(len(left.rates), len(right.rates))
    differs = left.rates[:length] != right.rates[:length]
    rows = np.flatnonzero(differs.any(axis=1) if differs.ndim > 1 else differs)
    if not len(rows):
        return total
    return min(total, int(rows[0]))


def list_earlier_changes(
    changes: Sequence[Difference], left: RateTable, right: RateTable, step: int
) -> list[Difference]:
    """Return the changes that would have changed steps up to `step`.

    `changes` are keys that a resumed run can't change, and keys of the length.
    """
    if step == 0:
        return []
    has_equal_rates = count_equal_steps(left, right) >= step
    return [change for change in changes if not (has_equal_rates and changes_only_rates(change))]


KEEP_ALL = 1_000_000


@dataclass(frozen=True)
class Fork:
    """A run that begins with the first steps of another run."""

    origin: Path
    step: int
    """Steps of the other run."""
    recipe: Recipe
    changes: tuple[Difference, ...]
    """Keys of the recipe that differ from the other run's."""
    evaluates: bool
    """Whether an evaluation is due at the step, so that its line stays. A run is evaluated at its
    end, too, but a longer one isn't there."""

    def list_evaluations(self) -> list[LogLine]:
        """Return the run's evaluations up to the step. Raises DataError for a log that can't be
        read."""
        return [
            line
            for line in _read_until(self.origin / EVALS, self.step)
            if line.step < self.step or self.evaluates
        ]

    def to_dict(self) -> dict[str, Any]:
        """Return the origin, the step, and both values of each key, for JSON."""
        return {
            "run": str(self.origin.absolute()),
            "step": self.step,
            "changed": {
                change.key: {"was": change.other_value, "is": change.value}
                for change in self.changes
            },
        }


def is_evaluation_due(recipe: Recipe, steps_per_epoch: int, step: int) -> bool:
    """Return whether a recipe evaluates after `step` steps, besides at its end."""
    periods = list_event_periods(recipe, steps_per_epoch)[Event.EVALUATE]
    return step > 0 and is_due(step, periods)


def read_host(run_dir: Path, step: int) -> dict[str, Any] | None:
    """Return the host's state in the checkpoint of a step, as JSON; None without the checkpoint.

    Raises DamagedError if it can't be read.
    """
    folder = make_checkpoint_path(run_dir / FOLDER, step)
    if step not in list_saved_steps(run_dir / FOLDER):
        return None
    host = read_json(folder / HOST / META)
    if not isinstance(host, dict):
        raise DamagedError(f"{folder / HOST / META}: must be a JSON object")
    return host


def stop_early(fork: Fork) -> dict[str, Any]:
    """Return the state of the fork's early stop after the run's evaluations, as JSON."""
    early_stop = make_early_stop(fork.recipe.monitor.early_stop)
    for line in fork.list_evaluations():
        evaluation = _read_evaluation(line)
        if early_stop.metric in evaluation.metrics:
            early_stop.add(evaluation)
    return asdict(early_stop.progress)


def _read_evaluation(line: LogLine) -> Evaluation:
    """Return the evaluation of a line of evals.jsonl, which has null for a number that isn't
    finite."""
    fields = {key: value for key, value in line.fields.items() if key != "step"}
    metrics = {key: math.nan if value is None else value for key, value in fields.items()}
    return Evaluation(metrics, None)


def write_fork(
    folder: Path,
    fork: Fork,
    process: Mapping[str, Any],
    state: TrainState,
    host: Mapping[str, Any],
    *,
    select: Callable[[TrainState], TrainState],
) -> None:
    """Write the directory of a fork, whose state is in numpy; its recipe comes last.

    `process` describes this process, as in provenance.json, `host` is the host's state, and
    `select` returns the part of a state that checkpoints have.
    Raises RunError if it can't be written, or if the folder holds a run; DataError if it holds
    other files, or if a log of the run can't be read. Then nothing of the fork is left.
    """
    with (
        lock_run(folder, new=True),
        convert_write_errors(folder),
        remove_if_failed(folder, FILES),
    ):
        _copy_records(folder, fork, process)
        tree = fork.recipe.model_dump(mode="json")
        retention = Retention(KEEP_ALL, fork.recipe.checkpoint.best)
        lines = [line for line in fork.list_evaluations() if line.step == fork.step]
        metrics = _read_evaluation(lines[0]).scalars() if lines else None
        with Checkpoints(folder, retention, tree, hash_recipe(tree), select=select) as checkpoints:
            checkpoints.save(fork.step, state, host, metrics)
            checkpoints.finish()
        write_recipe(folder, fork.recipe)


def copy_fork(folder: Path, fork: Fork, process: Mapping[str, Any]) -> None:
    """Write the directory of a fork at the last step of a run, with all checkpoints of the run.

    Raises the errors of `write_fork`.
    """
    with convert_write_errors(folder):
        _copy_records(folder, fork, process)
        (folder / FOLDER).mkdir(exist_ok=True)
        for step in list_saved_steps(fork.origin / FOLDER):
            _copy_checkpoint(fork.origin / FOLDER, folder / FOLDER, step, fork.recipe)
        for path in fork.origin.glob("events.*"):
            shutil.copy2(path, folder / path.name)
        write_recipe(folder, fork.recipe)


def _copy_records(folder: Path, fork: Fork, process: Mapping[str, Any]) -> None:
    """Write the logs up to the step, choices of lowerings and devices, and the provenance."""
    origin = fork.origin
    logs = {
        METRICS: _read_until(origin / METRICS, fork.step),
        EVALS: fork.list_evaluations(),
        SCALARS: _read_until(origin / SCALARS, fork.step),
    }
    for name, lines in logs.items():
        if (origin / name).is_file():
            (folder / name).write_bytes(b"".join(line.text for line in lines))
    for name in (LOWERINGS, PLAN):
        if (origin / name).is_file():
            write_whole(folder / name, (origin / name).read_text(encoding="utf-8"))
    try:
        earlier = list(read_provenance(origin))
    except DataError:
        earlier = []
    processes = [*earlier, {**process, FORK: fork.to_dict()}]
    write_whole(folder / PROVENANCE, format_json({"processes": processes}, indent=2) + "\n")


def _read_until(log: Path, step: int) -> list[LogLine]:
    """Return the lines of a log up to a step; none without the file."""
    if not log.is_file():
        return []
    lines = []
    for line in read_lines(log):
        if line.step > step:
            break
        lines.append(line)
    return lines


def _copy_checkpoint(source: Path, target: Path, step: int, recipe: Recipe) -> None:
    """Copy a checkpoint, whose arrays and host state stay, as one of another recipe."""
    tree = recipe.model_dump(mode="json")
    folder = make_checkpoint_path(target, step)
    draft = make_draft_path(folder)
    ignore = partial(_ignore_manifest, make_checkpoint_path(source, step))
    shutil.copytree(make_checkpoint_path(source, step), draft, ignore=ignore)
    (draft / SAVED_RECIPE / META).write_text(json.dumps(tree), encoding="utf-8")
    write_manifest(draft, hash_recipe(tree))
    commit(draft, folder)


def _ignore_manifest(root: Path, folder: str, names: list[str]) -> list[str]:
    return [MANIFEST] if Path(folder) == root else []
