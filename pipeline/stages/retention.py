"""Which checkpoints of a run are kept, as policies for orbax."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from orbax.checkpoint import checkpoint_managers as policies

from pipeline.config.recipe import CheckpointSpec
from pipeline.stages.manifest import DamagedError, read_json
from pipeline.stages.saved import saved_steps
from pipeline.training.spec import METRICS

METRIC = "metrics"
"""The folder of the metrics in a checkpoint and the file in there, as orbax names both."""


@dataclass(frozen=True)
class _Best(policies.PreservationPolicy):
    """The checkpoint with the best value of a metric, also from before a run was resumed."""

    metric: str
    before: Mapping[int, float]
    """The values of checkpoints that were there already, by step."""

    def should_preserve(
        self,
        checkpoints: Sequence[policies.PolicyCheckpointInfo],
        *,
        context: policies.PreservationContext,
    ) -> Sequence[bool]:
        """The best one alone; of equal ones the newest."""
        sign = 1 if METRICS[self.metric] == "max" else -1
        known = {
            info.step: info.metrics[self.metric] if info.metrics else self.before.get(info.step)
            for info in checkpoints
        }
        values = {
            step: sign * value
            for step, value in known.items()
            if value is not None and not math.isnan(value)
        }
        best = max(values, key=lambda step: (values[step], step), default=None)
        return [info.step == best for info in checkpoints]


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
        due = [step for step in steps if any(step % period == 0 for period in self.periods)]
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
    values = {step: _value(root / str(step), spec.best) for step in saved_steps(root)}
    before = {step: value for step, value in values.items() if value is not None}
    return policies.AnyPreservationPolicy([*newest, _Best(spec.best, before)])


def _value(folder: Path, metric: str) -> float | None:
    """The metric of a checkpoint; None where it has none that can be read."""
    try:
        value = read_json(folder / METRIC / METRIC)[metric]
    except (DamagedError, LookupError, TypeError):
        return None
    return value if isinstance(value, int | float) else None
