"""Retention of a run's checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import MANIFEST, METRICS, checkpoint_path, draft_path
from pipeline.checkpoint.manifest import SAVED_AT, DamagedError, read_json
from pipeline.core.files.atomic_write import commit, sync
from pipeline.training.component_specs import list_metric_directions


def hold_nothing(step: int) -> bool:
    """Return False: no rollback goes back to a step."""
    return False


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep`, the newest `keep` of the steps that it holds, and the best by a
    metric.

    A rollback goes back to the steps for which `holds` returns True, so they stay even if a signal
    or a clock makes the run save often. With `minutes` the first checkpoint stays, and after each
    that stays the first one that is at least `minutes` younger (MindSpore's
    keep_checkpoint_per_n_minutes).
    """

    keep: int
    best: str | None = None
    holds: Callable[[int], bool] = hold_nothing
    minutes: int | None = None

    def removable(self, root: Path, steps: Sequence[int]) -> list[int]:
        """Return the steps, of these ascending ones, whose checkpoints may be removed."""
        due = [step for step in steps if self.holds(step)]
        retained: set[int | None] = {*steps[-self.keep :], *due[-self.keep :]}
        if self.best is not None:
            retained.add(_best(root, steps, self.best))
        if self.minutes is not None:
            retained.update(_select_spaced(root, steps, 60.0 * self.minutes))
        return [step for step in steps if step not in retained]


def add_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add metrics to a complete checkpoint that was saved without. Raises OSError."""
    draft = draft_path(folder)
    draft.write_text(json.dumps(dict(metrics)), encoding="utf-8")
    # Empty if the process is killed now, which is harmless: only files are listed.
    (folder / METRICS).mkdir(exist_ok=True)
    commit(draft, folder / METRICS / METRICS)
    sync(folder)


def _select_spaced(root: Path, steps: Sequence[int], seconds: float) -> Iterator[int]:
    """Yield the first step, and each that was saved `seconds` or more after the last one yielded.

    Checkpoints without a readable time are passed over, and so may be removed.
    """
    last: float | None = None
    for step in steps:
        saved_at = _read_value(checkpoint_path(root, step) / MANIFEST, SAVED_AT)
        if not isinstance(saved_at, float):
            continue
        if last is None or saved_at - last >= seconds:
            last = saved_at
            yield step


def _best(root: Path, steps: Sequence[int], metric: str) -> int | None:
    """Return the step with the best value, of equal ones the newest; None without any value."""
    sign = 1 if list_metric_directions([metric])[metric] == "max" else -1
    readings = {
        step: _read_number(checkpoint_path(root, step) / METRICS / METRICS, metric)
        for step in steps
    }
    values = {step: sign * value for step, value in readings.items() if value is not None}
    return max(values, key=lambda step: (values[step], step), default=None)


def _read_number(file: Path, key: str) -> float | None:
    """Read a number of a JSON file; None if it is missing or isn't a number."""
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
