"""Which checkpoints of a run are kept, as policies for orbax."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from orbax.checkpoint import checkpoint_managers as policies

from pipeline.config.recipe import CheckpointSpec
from pipeline.stages.manifest import DamagedError, read_json
from pipeline.stages.periods import is_due
from pipeline.training.spec import METRICS
from pipeline.whole_file import write_whole

METRIC = "metrics"
"""The folder of the metrics in a checkpoint and the file in there, as orbax names both."""


@dataclass(frozen=True)
class _Best(policies.PreservationPolicy):
    """The checkpoint with the best value of a metric, also from before a run was resumed."""

    metric: str
    root: Path
    known: dict[int, float] = field(default_factory=dict)
    """The values that were read from `root`, by step: orbax knows those that it wrote itself."""

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        """The best one alone; of equal ones the newest."""
        sign = 1 if METRICS[self.metric] == "max" else -1
        known = {info.step: self._value(info) for info in checkpoints}
        values = {
            step: sign * value
            for step, value in known.items()
            if value is not None and not math.isnan(value)
        }
        best = max(values, key=lambda step: (values[step], step), default=None)
        return [info.step == best for info in checkpoints]

    def _value(self, info: policies.PolicyCheckpointInfo) -> float | None:
        if info.metrics:
            return info.metrics[self.metric]
        if info.step not in self.known:
            value = _read_value(self.root / str(info.step), self.metric)
            if value is None:
                return None
            self.known[info.step] = value
        return self.known[info.step]


@dataclass(frozen=True)
class _Scheduled(policies.PreservationPolicy):
    """The newest `keep` checkpoints of those at multiples of some periods."""

    periods: Sequence[int]
    keep: int

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        """Those that a run can go back to, however often a signal or a clock has it save."""
        steps = [info.step for info in checkpoints]
        due = [step for step in steps if is_due(step, self.periods)]
        return [step in due[-self.keep :] for step in steps]


def retention(spec: CheckpointSpec, root: Path, held: Sequence[int]) -> policies.PreservationPolicy:
    """Keep the newest `keep`, of those at multiples of `held` as well, and the best.

    `root` holds the checkpoints there are already.
    """
    newest: list[policies.PreservationPolicy] = [policies.LatestN(spec.keep)]
    if held:
        newest.append(_Scheduled(held, spec.keep))
    if spec.best is None:
        return policies.AnyPreservationPolicy(newest)
    return policies.AnyPreservationPolicy([*newest, _Best(spec.best, root)])


@dataclass(frozen=True)
class _Complete:
    """A checkpoint on disk, as policies ask about it."""

    step: int
    metrics: dict[str, Any] | None = None
    time: datetime = datetime.min


def not_kept(policy: policies.PreservationPolicy, steps: Sequence[int]) -> list[int]:
    """Those of the checkpoints of these steps, ascending, that a policy lets go."""
    found = [_Complete(step) for step in steps]
    kept = policy.should_preserve(found, context=policies.PreservationContext())
    return [step for step, keep in zip(steps, kept, strict=True) if not keep]


def write_metrics(folder: Path, metrics: Mapping[str, float]) -> None:
    """Give a complete checkpoint the metrics that it was saved without. Raises OSError."""
    (folder / METRIC).mkdir(exist_ok=True)
    write_whole(folder / METRIC / METRIC, json.dumps(dict(metrics)))


def _read_value(folder: Path, metric: str) -> float | None:
    """The metric of a checkpoint; None where it has none that can be read."""
    try:
        value = read_json(folder / METRIC / METRIC)[metric]
    except (DamagedError, LookupError, TypeError):
        return None
    return value if isinstance(value, int | float) else None
