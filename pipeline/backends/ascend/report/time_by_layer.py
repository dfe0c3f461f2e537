"""Device time of a step by layer and phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.models.modules.name_stack import layer_of

if TYPE_CHECKING:
    from pipeline.backends.ascend.report.priced_step import TaskCost

IMPORTED = "ImportedNetwork"
"""Scope of an imported network, the name of its flax class."""


@dataclass(frozen=True, slots=True)
class Layer:
    """Device time in us of one module's tasks, all iterations of loops together.

    All-reduces belong to no layer.
    """

    name: str
    tasks: int
    forward_us: float = 0.0
    backward_us: float = 0.0
    update_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of all phases."""
        return self.forward_us + self.backward_us + self.update_us


def slowest_layers(timeline: Timeline, graph: TaskGraph, count: int = 10) -> tuple[Layer, ...]:
    """Return the `count` layers that keep the device busy longest, slowest first."""
    spent: dict[str, dict[str, float]] = {}
    tasks: dict[str, int] = {}
    for span in timeline.spans:
        if span.task is None or span.stream == "host":
            continue
        task = graph.tasks[span.task]
        phase = task.phase if task.phase in ("forward", "backward") else "update"
        name = layer_named(task)
        of_layer = spent.setdefault(name, {"forward": 0.0, "backward": 0.0, "update": 0.0})
        of_layer[phase] += span.duration_us
        tasks[name] = tasks.get(name, 0) + 1
    layers = [
        Layer(name, tasks[name], us["forward"], us["backward"], us["update"])
        for name, us in spent.items()
    ]
    return tuple(sorted(layers, key=lambda layer: (-layer.us, layer.name))[:count])


def layer_named(task: Task | TaskCost) -> str:
    """Return the layer that a task belongs to.

    A task outside any module is named by its phase, and one of an imported network by its op type:
    much of such a network may be plain functions.
    """
    layer = layer_of(task.scope)
    if layer == IMPORTED:
        return f"(outside modules): {task.type}"
    return layer or f"({task.phase})"
