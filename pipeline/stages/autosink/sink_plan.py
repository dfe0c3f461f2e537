"""Sinks of a run, and how the recipe sets them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.backends.base import MECHANISM_TEXTS
from pipeline.config.recipe import TrainSpec
from pipeline.core.files.value_text import count_noun

if TYPE_CHECKING:
    from pipeline.backends.base import Backend, Executable, Mechanism
    from pipeline.backends.sink_choice import SinkChoice
    from pipeline.engine.schedule import RunSchedule

SINGLE_STEPS_REASON = "one asynchronous dispatch per step: its convolutions are slow in a loop"


@dataclass(frozen=True)
class SinkPlan:
    """The sinks of a run, and their predicted times if they were measured."""

    size: int | None
    """Steps of a sink; None without sinks."""
    mechanism: Mechanism
    reason: str
    choice: SinkChoice | None = None
    host_entry: Mapping[str, Any] = field(default_factory=dict)
    """Entry of a checkpoint from which a resumed run reads these sinks; {} for a recipe's sinks."""

    def __str__(self) -> str:
        if self.size is None:
            return "none"
        return f"{count_noun(self.size, 'step')} {MECHANISM_TEXTS[self.mechanism]}"

    def summary(self) -> dict[str, Any]:
        """Return the section `sink` of summary.json."""
        section: dict[str, Any] = {
            "size": self.size,
            "mechanism": self.mechanism,
            "why": self.reason,
        }
        if self.choice is not None:
            names = ("off_ms", "step_ms", "gain")
            section["predicted"] = {name: getattr(self.choice, name) for name in names}
        return section


def make_sink_plan(
    train: TrainSpec, run_schedule: RunSchedule, executable: Executable, backend: Backend
) -> SinkPlan:
    """Return the sinks of a recipe whose `train.sink_size` isn't `auto`."""
    if train.sink and executable.report.single_steps:
        return SinkPlan(run_schedule.sink_steps, "soft", SINGLE_STEPS_REASON)
    mechanism, reason = backend.choose_mechanism(train.mechanism, sink=train.sink)
    return SinkPlan(run_schedule.sink_steps, mechanism, reason)
