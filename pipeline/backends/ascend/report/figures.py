"""All figures of a priced step: under each launch mode, in memory, and by AutoTune."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.backends.ascend.chip.options import ExecutionConfig, Mode
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.backends.ascend.tune.autotune import TuneResult

LAYERS_IN_JSON = 10


@dataclass(frozen=True, eq=False, repr=False)
class Figures(PricedStep):
    """A priced step with its memory, its AutoTune result and its time under each launch mode.

    `tuning` is None without AutoTune. `modes` holds the step's own mode as well, and none that the
    device can't run it in: a sink's batches have to fit the queue on the device.
    """

    memory: MemoryPlan
    tuning: TuneResult | None
    modes: Mapping[Mode, PricedStep]

    @property
    def tuned_us(self) -> tuple[float, float]:
        """Microseconds of all products of a step before and after AutoTune; zeros without it."""
        tuned = self.tuning.tasks if self.tuning else ()
        repeats = [self.graph.tasks[task.index].repeat for task in tuned]
        before = sum(task.before_us * count for task, count in zip(tuned, repeats, strict=True))
        after = sum(task.after_us * count for task, count in zip(tuned, repeats, strict=True))
        return before, after

    def to_dict(self) -> dict[str, Any]:
        """Return everything but the tasks, ready for JSON; keys of modelled times say so."""
        low, high = self.interval_ms
        return {
            "hardware": self.chip,
            "question": _plain(self.config),
            "modelled_step_ms": self.step_ms,
            "modelled_interval_ms": [low, high],
            "modelled_device_ms": self.device_ms,
            "modelled_samples_per_s": self.samples_per_s,
            "modelled_phases_ms": dict(self.phases),
            "modelled_iteration_ms": {
                "interval": self.iteration.interval_us / 1e3,
                "fp_bp": self.iteration.fp_bp_us / 1e3,
                "tail": self.iteration.tail_us / 1e3,
            },
            "modelled_exposed_ms": {k: us / 1e3 for k, us in self.timeline.exposed_us.items()},
            "modelled_shares": dict(self.shares),
            "modelled_modes_ms": {mode: step.step_ms for mode, step in self.modes.items()},
            "modelled_modes_interval_ms": {
                mode: list(step.interval_ms) for mode, step in self.modes.items()
            },
            "modelled_communication": vars(self.communication) if self.communication else None,
            "bound": self.bound,
            "memory": self._memory_dict(),
            "auto_tune": self._tuning_dict(),
            "layers": [
                {"layer": layer.layer, "modelled_ms": layer.us / 1e3, "share": layer.share}
                for layer in self.layers[:LAYERS_IN_JSON]
            ],
            "coverage": dict(self.coverage),
            "tasks": len(self.graph.tasks),
        }

    def _memory_dict(self) -> dict[str, Any]:
        plan = self.memory
        return {
            "verdict": plan.verdict,
            "used_bytes": plan.used_bytes,
            "pools": {
                limit.what: {"used_bytes": limit.used_bytes, "limit_bytes": limit.limit_bytes}
                for limit in plan.limits
            },
            "components": dict(plan.components),
        }

    def _tuning_dict(self) -> dict[str, Any] | None:
        if self.tuning is None:
            return None
        before_us, after_us = self.tuned_us
        return {
            "operators": len(self.tuning.tasks),
            "modelled_before_ms": before_us / 1e3,
            "modelled_after_ms": after_us / 1e3,
        }


def _plain(config: ExecutionConfig) -> dict[str, Any]:
    shown = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return {**shown, "without": sorted(config.without)}
