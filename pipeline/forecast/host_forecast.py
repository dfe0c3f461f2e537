"""Forecast of a step here: products by the lowerings' bank or measured peaks, the rest by bytes.

The kernels of the rest are those that the emulated device's compiler forms of the traced step:
XLA, too, fuses element-wise work up to what must be in memory.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.backends.ascend.chip.item_sizes import item_bytes
from pipeline.backends.ascend.chip.tasks import CostClass, Task, TaskGraph
from pipeline.backends.ascend.estimate import trace_proposal
from pipeline.backends.base import Backend, StepToPrice
from pipeline.files.tuning_flow import Banks
from pipeline.forecast.host_peaks import HostPeaks, measure_host_peaks
from pipeline.lowerings.problem.lowering import Lowering, Problem
from pipeline.lowerings.tune.machine import describe_device
from pipeline.lowerings.tune.tuner import BUILT_IN, check_lowering_entry
from pipeline.stages.build import Built
from pipeline.stages.lowering_problems import count_problems

COUNTED: Mapping[str, tuple[CostClass, ...]] = {
    "conv2d": (
        "conv", "conv_input_grad", "conv_kernel_grad", "depthwise", "depthwise_input_grad",
        "depthwise_kernel_grad",
    ),
    "dense": ("matmul",),
    "max_pool": ("max_pool", "max_pool_grad"),
}  # fmt: skip
"""Classes of tasks that the problems of a kind stand for."""
NOT_HERE: tuple[CostClass, ...] = ("trans_data", "ai_cpu", "fill", "all_reduce")
"""Tasks of the emulated device alone."""
DEPTHWISE_SHARE = 0.05
"""FLOP/s of depthwise convolutions, relative to others: XLA runs them without a product."""


@dataclass(frozen=True)
class HostForecast:
    """The time of a step in ms, dispatched alone, and its parts.

    `banked` of the `problems` have a time in a bank of lowerings; the others are priced by peaks.
    """

    recipe: str
    device: str
    precision: str
    products_ms: float
    rest_ms: float
    overhead_ms: float
    banked: int
    problems: int
    peaks: HostPeaks

    @property
    def step_ms(self) -> float:
        """Milliseconds of one step."""
        return self.products_ms + self.rest_ms + self.overhead_ms

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"FORECAST, not measured: {self.recipe} on {self.device}, {self.precision}"
        yield f"  step      {self.step_ms:10.2f} ms, each dispatched alone"
        known = f"{self.banked} of {self.problems} by the bank of lowerings, others by peaks"
        yield f"  products  {self.products_ms:10.2f} ms: {known}"
        yield f"  the rest  {self.rest_ms:10.2f} ms: its bytes at the stream's rate"
        yield f"  launches  {self.overhead_ms:10.2f} ms"
        rates = self.peaks.flops
        yield (
            f"  peaks     {rates['dense', 'forward'] / 1e9:.0f} GFLOP/s products of matrices, "
            f"{rates['conv2d', 'forward'] / 1e9:.0f} convolutions, "
            f"{self.peaks.bytes_per_s / 1e9:.1f} GB/s"
        )


def forecast_step(
    proposal: StepToPrice, built: Built, backend: Backend, precision: str, folder: Path
) -> HostForecast:
    """Return what a step will take on a device that is at hand, without compiling it.

    `folder` holds the user's bank of lowerings. Raises RunError
    for a bank that is not one, or a step that can't be traced.
    """
    device = backend.device
    counted = count_problems(built.parts, built.state, proposal.device_batch)
    graph = trace_proposal(proposal, proposal.device_batch).tasks(None)
    dtypes = Counter(problem.dtype for problem in counted)
    peaks = measure_host_peaks(device, max(dtypes, key=dtypes.__getitem__, default="float32"))
    banks = Banks(folder / "lowerings.json", BUILT_IN, check_lowering_entry).read()
    here = describe_device(device)
    policy: Any = getattr(built.parts.network, "policy", None)
    products_us, banked = 0.0, 0
    for problem, count in counted.items():
        chosen = policy.choose(problem) if policy is not None else None
        known_us = _banked_us(banks.get(f"{problem} on {here}"), chosen)
        banked += known_us is not None
        products_us += count * (known_us if known_us is not None else _by_peaks(problem, peaks))
    tasks = _rest(graph, counted)
    rest_us = sum(_rest_us(graph, task, peaks) for task in tasks)
    small = sum(task.repeat for task in tasks)
    return HostForecast(
        recipe=proposal.name,
        device=backend.describe()["device"],
        precision=precision,
        products_ms=products_us / 1e3,
        rest_ms=rest_us / 1e3,
        overhead_ms=(small * peaks.op_us + peaks.dispatch_us) / 1e3,
        banked=banked,
        problems=len(counted),
        peaks=peaks,
    )


def _banked_us(entry: Mapping[str, Any] | None, chosen: Lowering | None) -> float | None:
    """Return a bank's time of the lowering that a run will use."""
    if entry is None:
        return None
    for name in ("after", "plain"):
        if chosen is not None and entry[name]["lowering"] == str(chosen):
            return float(entry[name]["us"])
    return float(entry["before_us"])


def _by_peaks(problem: Problem, peaks: HostPeaks) -> float:
    """Return the time of a problem at the rate that one of its kind and role reached."""
    flops: float = getattr(problem, "flops", 0.0)
    moved = item_bytes(problem.dtype) * sum(_size(shape) for shape in problem.operand_shapes)
    stream_us = peaks.stream_us(moved)
    rate = peaks.flops.get((problem.kind, problem.role))
    if rate is None:
        return 2 * stream_us
    share = DEPTHWISE_SHARE if getattr(problem, "is_depthwise", False) else 1.0
    return max(1e6 * flops / (rate * share), stream_us)


def _size(shape: Sequence[int]) -> int:
    return math.prod(shape)


def _rest(graph: TaskGraph, counted: Counter[Problem]) -> list[Task]:
    """Return the tasks that no problem stands for; attention's products are among them."""
    kinds = {problem.kind for problem in counted}
    done = {name for kind in kinds for name in COUNTED[kind]}
    return [
        task
        for task in graph.tasks
        if task.cost_class not in NOT_HERE
        and (
            task.cost_class not in done
            or (task.cost_class == "matmul" and task.cube is not None and task.cube.batch > 1)
        )
    ]


def _rest_us(graph: TaskGraph, task: Task, peaks: HostPeaks) -> float:
    buffers = [graph.buffers[index] for index in (*task.reads, *task.writes)]
    us = peaks.stream_us(sum(_size(each.shape) * item_bytes(each.dtype) for each in buffers))
    if task.cube is not None:
        kind = "dense" if task.cost_class == "matmul" else "conv2d"
        us = max(us, 2e6 * task.cube.macs / peaks.flops[kind, "forward"])
    return us * task.repeat


def checked(forecast: HostForecast, measured_ms: float) -> str:
    """Return the comparison of a forecast with a measured step, as a line."""
    off = forecast.step_ms / measured_ms - 1
    return (
        f"  measured  {measured_ms:10.2f} ms, so the forecast is {abs(off):.0%} too "
        f"{'long' if off > 0 else 'short'}"
    )
