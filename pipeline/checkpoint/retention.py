"""Retention: the rules that select which checkpoints of a run are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import (
    MANIFEST,
    METRICS,
    make_checkpoint_path,
    make_draft_path,
)
from pipeline.checkpoint.manifest import SAVED_AT, DamagedError, read_json
from pipeline.core.files.atomic_write import commit, sync
from pipeline.training.component_specs import list_metric_directions


@dataclass(frozen=True)
class Retention:
    """Rules for a run's checkpoints. A checkpoint is kept if any rule keeps it."""

    keep: int
    """Number of newest checkpoints to keep."""
    best: str | None = None
    """Metric whose best checkpoint is kept; None: no rule."""
    holds: Callable[[int], bool] = lambda _: False
    """Whether a rollback may go back to a step. The newest `keep` of these steps are kept too, so
    that extra checkpoints, such as those that signals cause, don't replace them."""
    minutes: int | None = None
    """Least time between two checkpoints that this rule keeps, of which the first checkpoint is
    one (MindSpore's keep_checkpoint_per_n_minutes); None: no rule."""

    def list_removable(self, root: Path, steps: Sequence[int]) -> list[int]:
        """Return the steps whose checkpoints may be removed. `steps` are all steps, ascending."""
        rollback_steps = [step for step in steps if self.holds(step)]
        retained: set[int | None] = {*steps[-self.keep :], *rollback_steps[-self.keep :]}
        if self.best is not None:
            retained.add(_find_best_step(root, steps, self.best))
        if self.minutes is not None:
            retained.update(_select_spaced(root, steps, 60.0 * self.minutes))
        return [step for step in steps if step not in retained]


def add_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add metrics to a complete checkpoint that was saved without metrics. Raises OSError."""
    draft = make_draft_path(folder)
    draft.write_text(json.dumps(dict(metrics)), encoding="utf-8")
    # If the process is killed after this, an empty folder remains, which is harmless.
    (folder / METRICS).mkdir(exist_ok=True)
    commit(draft, folder / METRICS / METRICS)
    sync(folder)


def _select_spaced(root: Path, steps: Sequence[int], spacing_s: float) -> Iterator[int]:
    """Yield the first step, and each step saved at least `spacing_s` after the last yielded one.

    If the clock was set back by more than that, the time since the last one is unknown.
    """
    last_saved_at = -math.inf
    for step in steps:
        saved_at = _read_value(make_checkpoint_path(root, step) / MANIFEST, SAVED_AT)
        if isinstance(saved_at, float) and abs(saved_at - last_saved_at) >= spacing_s:
            last_saved_at = saved_at
            yield step


def _find_best_step(root: Path, steps: Sequence[int], metric: str) -> int | None:
    """Return the step with the best value, the newest of equals; None if no step has a value."""
    sign = 1 if list_metric_directions([metric])[metric] == "max" else -1
    scores = {}
    for step in steps:
        value = _read_number(make_checkpoint_path(root, step) / METRICS / METRICS, metric)
        if value is not None:
            scores[step] = sign * value
    return max(scores, key=lambda step: (scores[step], step), default=None)


def _read_number(file: Path, key: str) -> float | None:
    """Read a number, finite or infinite, of a JSON file; None if it is missing or not a number."""
    try:
        value = float(_read_value(file, key))
    except (TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(value) else value


def _read_value(file: Path, key: str) -> Any:
    """Read a value of a JSON file; None if it is missing."""
    try:
        return read_json(file)[key]
    except (DamagedError, LookupError, TypeError):
        return None
