"""The result of pricing a step: its figures as text, as JSON, as a trace and as a page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.options import Mode
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan
from pipeline.backends.ascend.report.html_timeline import render_picture
from pipeline.backends.ascend.report.perfetto_trace import write_trace
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.backends.ascend.report.text import format_report
from pipeline.backends.ascend.tune.autotune import TuneResult
from pipeline.core.files.atomic_write import write_whole

LAYERS_IN_JSON = 10


@dataclass(frozen=True, eq=False, repr=False)
class Report(PricedStep):
    """The price of one steady step. All figures are modelled.

    `tuning` is None without AutoTune. `modes` has the step by launch mode. Modes that the device
    can't run it in are left out, such as one whose batches don't fit the queue on the device.
    """

    memory: MemoryPlan
    tuning: TuneResult | None
    modes: Mapping[Mode, PricedStep]

    def __str__(self) -> str:
        return format_report(self)

    @property
    def tuned_us(self) -> tuple[float, float]:
        """Microseconds of the tuned products of a step before AutoTune, and after it; else 0."""
        tuned = self.tuning.tasks if self.tuning else ()
        before = sum(task.before_us * task.product.repeat for task in tuned)
        after = sum(task.after_us * task.product.repeat for task in tuned)
        return before, after

    def to_dict(self) -> dict[str, Any]:
        """Return all figures but the tasks, ready for JSON. Keys of times contain `modelled`."""
        before_us, after_us = self.tuned_us
        auto_tune = None
        if self.tuning is not None:
            auto_tune = {
                "operators": len(self.tuning.tasks),
                "modelled_before_ms": before_us / 1e3,
                "modelled_after_ms": after_us / 1e3,
            }
        options = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {
            "hardware": self.chip,
            "question": {**options, "without": sorted(self.config.without)},
            "modelled_step_ms": self.step_ms,
            "modelled_interval_ms": list(self.interval_ms),
            "modelled_table_interval_ms": list(self.table_interval_ms),
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
            "modelled_pipelines": dict(self.pipelines),
            "modelled_inserted_ms": {time.type: time.us / 1e3 for time in self.inserted},
            "modelled_modes_ms": {mode: step.step_ms for mode, step in self.modes.items()},
            "modelled_modes_interval_ms": {
                mode: list(step.interval_ms) for mode, step in self.modes.items()
            },
            "modelled_communication": vars(self.communication) if self.communication else None,
            "bound": self.bound,
            "memory": {
                "verdict": self.memory.verdict,
                "used_bytes": self.memory.used_bytes,
                "pools": {
                    name: {"used_bytes": pool.used_bytes, "limit_bytes": pool.limit_bytes}
                    for name, pool in self.memory.pools.items()
                },
                "components": dict(self.memory.components),
            },
            "auto_tune": auto_tune,
            "layers": [
                {"layer": layer.layer, "modelled_ms": layer.us / 1e3, "share": layer.share}
                for layer in self.layers[:LAYERS_IN_JSON]
            ],
            "coverage": dict(self.coverage),
            "tasks": len(self.graph.tasks),
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def save_trace(self, path: str | Path) -> None:
        """Write the step as a trace that Perfetto and chrome://tracing open."""
        write_trace(self.timeline, self.graph, Path(path))

    def save_picture(self, path: str | Path, title: str = "Modelled step") -> None:
        """Write the step as an HTML page without script or other files."""
        write_whole(Path(path), render_picture(self.timeline, self.graph, title))
