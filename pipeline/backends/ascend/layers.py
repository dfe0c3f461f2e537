"""A step's time by layer: which module costs what, and in which phase."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.backends.ascend.tasks import TaskGraph
from pipeline.backends.ascend.timeline import Timeline


@dataclass(frozen=True, slots=True)
class Layer:
    """What the tasks of one scope take, all turns together; all-reduces belong to no layer."""

    scope: str
    tasks: int
    forward_us: float = 0.0
    backward_us: float = 0.0
    update_us: float = 0.0

    @property
    def us(self) -> float:
        return self.forward_us + self.backward_us + self.update_us


def dearest_layers(timeline: Timeline, graph: TaskGraph, count: int = 10) -> tuple[Layer, ...]:
    """The layers that keep the device busy longest, the dearest first."""
    spent: dict[str, dict[str, float]] = {}
    tasks: dict[str, int] = {}
    for span in timeline.spans:
        if span.task is None or span.stream == "host":
            continue
        task = graph.tasks[span.task]
        phase = task.phase if task.phase in ("forward", "backward") else "update"
        of_layer = spent.setdefault(task.scope, {"forward": 0.0, "backward": 0.0, "update": 0.0})
        of_layer[phase] += span.duration_us
        tasks[task.scope] = tasks.get(task.scope, 0) + 1
    layers = [
        Layer(scope, tasks[scope], us["forward"], us["backward"], us["update"])
        for scope, us in spent.items()
    ]
    return tuple(sorted(layers, key=lambda layer: (-layer.us, layer.scope))[:count])
