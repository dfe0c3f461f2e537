"""Retention: which checkpoints of a run are kept."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.sink.schedule import is_due
from pipeline.stages.checkpoint.checkpoint_folder import DRAFT, METRICS
from pipeline.stages.checkpoint.manifest import DamagedError, read_json
from pipeline.training.part_specs import metric_directions


@dataclass(frozen=True)
class Retention:
    """Keep the newest `keep`, of those at multiples of `held` as well, and the best by a metric.

    A rollback goes back to those of `held`, however often a signal or a clock makes the run save.
    """

    keep: int
    best: str | None = None
    held: Sequence[int] = ()

    def removable(self, root: Path, steps: Sequence[int]) -> list[int]:
        """Return the steps, of these ascending ones, whose checkpoints need not be kept."""
        due = [step for step in steps if is_due(step, self.held)]
        kept: set[int | None] = {*steps[-self.keep :], *due[-self.keep :]}
        if self.best is not None:
            kept.add(_best(root, steps, self.best))
        return [step for step in steps if step not in kept]


def add_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Add metrics to a complete checkpoint that was saved without. Raises OSError."""
    draft = folder.with_name(f"{folder.name}{DRAFT}")
    draft.write_text(metrics_text(metrics), encoding="utf-8")
    # Empty where the process is killed now, which is harmless: only files are listed.
    (folder / METRICS).mkdir(exist_ok=True)
    draft.replace(folder / METRICS / METRICS)


def metrics_text(metrics: Mapping[str, float]) -> str:
    """Return the content of a checkpoint's file of metrics."""
    return json.dumps(dict(metrics))


def _best(root: Path, steps: Sequence[int], metric: str) -> int | None:
    """Return the step with the best value, of equal ones the newest; None without any value."""
    sign = 1 if metric_directions([metric])[metric] == "max" else -1
    known = {step: _read_value(root / str(step), metric) for step in steps}
    values = {step: sign * value for step, value in known.items() if value is not None}
    return max(values, key=lambda step: (values[step], step), default=None)


def _read_value(folder: Path, metric: str) -> float | None:
    """Read the metric of a checkpoint; None where there is none, or it is no number."""
    try:
        value = float(read_json(folder / METRICS / METRICS)[metric])
    except (DamagedError, LookupError, TypeError, ValueError, OverflowError):
        return None
    return None if math.isnan(value) else value
