"""Small graphs of tasks whose times are known, and the figures of the chip for the tests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.hardware import FIGURES, Hardware
from pipeline.backends.ascend.chip.options import StepOptions
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph, TaskTime

CHIP = Path(__file__).parents[3] / "conf" / "device" / "ascend910.yaml"


def _chip() -> Hardware:
    figures = yaml.safe_load(CHIP.read_text())
    return Hardware(**{name: float(figures[name]["value"]) for name in FIGURES})


HW = _chip()
BARE = replace(
    HW,
    task_gap_us=0.0,
    event_handover_us=0.0,
    collective_launch_us=0.0,
    sink_interval_us=0.0,
    sink_interval_distributed_us=0.0,
    host_step_us=0.0,
    graph_launch_us=0.0,
)
"""A chip on which nothing but tasks and op launches takes time."""

ENGINES = {
    "cube": ("MatMul", "matmul"),
    "vector": ("Add", "elementwise"),
    "ai_cpu": ("DropoutGenMask", "ai_cpu"),
    "hccl": ("AllReduce", "all_reduce"),
}


def task(engine: Any = "cube", phase: Any = "forward", **fields: Any) -> Task:
    """A task of an engine, by default without reads and writes."""
    name, cost_class = ENGINES[engine]
    defaults = {"type": name, "scope": "net", "cost_class": cost_class, "reads": (), "writes": ()}
    return Task(**{**defaults, **fields, "engine": engine, "phase": phase})


def timed(us: float, bound: Any = "cube") -> TaskTime:
    """A task time of which only the length matters."""
    return TaskTime(us, us, bound, "measured")


def chain(*us: float, **fields: Any) -> tuple[TaskGraph, tuple[TaskTime, ...]]:
    """Tasks that each read the output of the one before."""
    tasks = tuple(
        task(reads=(number - 1,) if number else (), writes=(number,), **fields)
        for number in range(len(us))
    )
    return TaskGraph((), tasks), tuple(timed(task_us) for task_us in us)


def network(layers: int, backward_us: float, nbytes: int) -> tuple[TaskGraph, list[TaskTime]]:
    """Forward, backward with one gradient a layer, and one update a parameter."""
    tasks = [task(writes=(0,))]
    times = [timed(backward_us)]
    gradients = []
    for number in range(layers):
        tasks.append(task(phase="backward", reads=(number,), writes=(number + 1,)))
        times.append(timed(backward_us))
        gradients.append((f"p{layers - 1 - number}", nbytes, number + 1))
    for number in reversed(range(layers)):
        tasks.append(
            task(
                "vector",
                "optimizer",
                type="Momentum",
                cost_class="optimizer",
                reads=(number + 1,),
                writes=(1000 + number,),
            )
        )
        times.append(timed(5.0))
    return TaskGraph((), tuple(tasks), gradients=tuple(gradients)), times


@st.composite
def graphs(draw: st.DrawFn) -> tuple[TaskGraph, tuple[TaskTime, ...]]:
    """Steps of any shape: engines, scans, masks from the AI CPU, gradients and updates."""
    phases = draw(st.lists(st.sampled_from(["forward", "backward", "optimizer"]), max_size=14))
    if draw(st.booleans()):
        phases.sort(key=["forward", "backward", "optimizer"].index)
    tasks: list[Task] = []
    for number, phase in enumerate(phases):
        engine = draw(st.sampled_from(["cube", "vector", "vector", "ai_cpu", "hccl"]))
        reads = (
            tuple(sorted(draw(st.sets(st.integers(0, number - 1), max_size=3)))) if number else ()
        )
        repeat = draw(st.sampled_from([1, 1, 1, 4]))
        fields: dict[str, Any] = {"reads": reads, "writes": (number,), "repeat": repeat}
        if phase == "optimizer" and engine == "vector":
            fields |= {"type": "Momentum", "cost_class": "optimizer"}
        tasks.append(task(engine, phase, **fields))
    made = [number for number, phase in enumerate(phases) if phase == "backward"]
    sizes = [draw(st.integers(0, 200_000_000)) for _ in made]
    gradients = tuple((f"p{at}", size, at) for at, size in zip(made, sizes, strict=True))
    times = tuple(timed(draw(st.floats(0.5, 3000.0))) for _ in tasks)
    return TaskGraph((), tuple(tasks), gradients=gradients), times


@st.composite
def options(draw: st.DrawFn) -> StepOptions:
    """Everything but the mode and the fusion of gradients, which depends on the graph."""
    return StepOptions(
        sink_size=draw(st.sampled_from([1, 2, 100])),
        devices=draw(st.sampled_from([1, 2, 5, 8, 16, 24, 1024])),
        batch_size=draw(st.integers(1, 256)),
        batch_bytes=draw(st.integers(0, 1 << 30)),
        host_images_per_s=draw(st.none() | st.floats(10.0, 1e5)),
        data_sink=draw(st.booleans()),
        prefetches=draw(st.booleans()),
        op_launch_us=draw(st.none() | st.floats(0.0, 400.0)),
    )
