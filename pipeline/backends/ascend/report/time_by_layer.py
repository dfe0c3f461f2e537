"""A step's time by layer: which module costs what, and in which phase."""

from __future__ import annotations

import re
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.simulate.timeline import Timeline

MARKS = re.compile(r"^(?:(?:transpose|jvp|vmap)\()+")
"""What JAX's transformations add to a name stack's parts."""
NOT_NAMED = frozenset({"", "checkpoint", "rematted_computation"})
"""Parts that no user has named."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a module's tasks take, all turns together; all-reduces belong to no layer."""

    name: str
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
        name = layer_named(task.scope, task.phase)
        of_layer = spent.setdefault(name, {"forward": 0.0, "backward": 0.0, "update": 0.0})
        of_layer[phase] += span.duration_us
        tasks[name] = tasks.get(name, 0) + 1
    layers = [
        Layer(name, tasks[name], us["forward"], us["backward"], us["update"])
        for name, us in spent.items()
    ]
    return tuple(sorted(layers, key=lambda layer: (-layer.us, layer.name))[:count])


def layer_named(scope: str, phase: str) -> str:
    """The layer that a task belongs to; outside any module its phase stands for one."""
    return layer_of(scope) or f"({phase})"


def layer_of(scope: str) -> str:
    """The module path in a JAX name stack, without its marks: `jvp(Net)/conv_0` is `conv_0`.

    A root that opens with a capital is flax's, the class of the whole network; another is a
    named scope, and stays: `jvp(encoder)/attention` is `encoder/attention`.
    """
    names: list[str] = []
    for part in scope.split("/"):
        name = MARKS.sub("", part).rstrip(")")
        if name in NOT_NAMED or name.startswith("jit("):
            continue
        # A recomputed forward pass is marked anew, from the root on, inside the backward one.
        anew = name != part and bool(names) and name == names[0]
        names = [name] if anew else [*names, name]
    of_flax = len(names) > 1 and names[0][0].isupper()
    return "/".join(names[1:] if of_flax else names)
