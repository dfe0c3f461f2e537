"""Fit the cost model to timed kernels: `python -m benchmarks.ascend_fit.fit_kernels`.

Shared constants start from the figures of documents and arithmetic (`PRIORS`), rates of the classes
from 1. Coordinate descent lowers a Huber loss of log(measured / modelled), in which a kernel weighs
by its time, plus the distance from the start. All kernels are treated alike. Classes with fewer
than `FEWEST` kernels keep the rates of the file.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median
from types import MappingProxyType
from typing import Any

import yaml

from benchmarks.ascend_fit.measured_kernels import Trace, read_traces
from pipeline.backends.ascend.chip.chip_files import load_chip
from pipeline.backends.ascend.chip.hardware import Hardware, extract_hardware
from pipeline.backends.ascend.cost.efficiency import (
    EFFICIENCY_FILE,
    RATE_BOUNDS,
    ClassEfficiency,
    Constants,
    Efficiency,
    load_efficiency,
)
from pipeline.backends.ascend.cost.task_time import CUBE_CLASSES, price_tasks, runs_on_vector

PRIORS = Constants(
    hbm_read=0.85,
    hbm_write=1.2,
    l2_full=2.0,
    l2_none=4.0,
    cube_overlap=1.25,
    few_channels=0.5,
    vector_overlap=1.5,
    vector_rate=0.35,
    heavy_operations=2.0,
    core_bytes=2048.0,
    gather_row_cycles=270.0,
    scatter_row_cycles=240.0,
    minor_row_cycles=22.0,
    pad_row_cycles=125.0,
    slice_row_cycles=170.0,
    resize_row_cycles=74.85,
    transpose_element_cycles=1.4,
    transpose_square_cycles=66.0,
    bias_segment_cycles=190.0,
    bias_bytes_per_cycle=17.0,
    pool_block_cycles=700.0,
    pool_tap_cycles=2.1,
    pool_grad_block_cycles=5300.0,
    pool_grad_tap_cycles=4.1,
)
"""Start of the fit. Overlap: 1 adds stages, infinity counts only the longest. The cycles are slopes
of a few kernels of one kind that differ in size, read off the traces by hand. Writes stay at device
memory's nominal rate, which MemSet reaches."""

AT_LEAST_ONE = ("cube_overlap", "vector_overlap")
FEWEST = 5
HUBER = 0.2
CONSTANT_SD = 0.4
RATE_SD = 0.8
SHORT_US = 10.0
"""Kernels much shorter than this weigh less: they are mostly floor."""
STEPS = (0.2, 0.07, 0.02)
LEAST_SD = 0.1
OTHER_SCHEDULE_CORES = 16
"""Products of the 2020 trace on fewer cores are skipped: its release put batches of 2 on 1 to 8
cores, but the release of 2023 doesn't."""


@dataclass(frozen=True, slots=True)
class KernelResidual:
    """A kernel against the model."""

    trace: str
    kernel: str
    cost_class: str
    measured_us: float
    modelled_us: float

    @property
    def log_ratio(self) -> float:
        """log(measured / modelled)."""
        return math.log(self.measured_us / self.modelled_us)


@dataclass(frozen=True, slots=True)
class ClassFit:
    """Fit of a class: median of measured / modelled, median absolute log deviation from it."""

    cost_class: str
    count: int
    rate: float
    median_ratio: float
    mad: float
    total_ratio: float
    """Sum of measured by sum of modelled time."""


def measure_residuals(
    traces: Sequence[Trace], hw: Hardware, efficiency: Efficiency
) -> list[KernelResidual]:
    """Return the traces' kernels against the model; float32 products are separate."""
    residuals = []
    for trace in traces:
        times = price_tasks(trace.graph, hw, efficiency)
        for kernel, task, time in zip(trace.kernels, trace.graph.tasks, times, strict=True):
            if task.cost_class == "conv" and 0 < kernel.cores < OTHER_SCHEDULE_CORES:
                continue
            name = "matmul (float32)" if runs_on_vector(task, hw) else task.cost_class
            residuals.append(KernelResidual(trace.name, kernel.name, name, kernel.us, time.us))
    return residuals


def fit(traces: Sequence[Trace], hw: Hardware, start: Efficiency) -> Efficiency:
    """Return the constants and rates that lower the loss; deterministic."""
    counts = _count_fitted(measure_residuals(traces, hw, start))
    point = {
        **_compute_logs(asdict(PRIORS)),
        **_compute_logs({f"rate {name}": 1.0 for name in counts}),
    }
    origin = dict(point)

    def compute_loss(point: Mapping[str, float]) -> float:
        residuals = measure_residuals(traces, hw, _make_efficiency(point, start))
        return _compute_misfit(residuals) + _compute_distance(point, origin)

    for step in STEPS:
        point = _descend(point, step, compute_loss)
    return _add_spread(_make_efficiency(point, start), counts, traces, hw)


def _descend(point: dict[str, float], step: float, loss: Any) -> dict[str, float]:
    """Step along one coordinate after another until none helps, for at most ten rounds."""
    best = loss(point)
    for _ in range(10):
        before = best
        for name in point:
            for sign in (1, -1):
                while (value := loss(trial := {**point, name: point[name] + sign * step})) < best:
                    point = trial
                    best = value
        if before - best < 1e-4:
            break
    return point


def _count_fitted(residuals: Sequence[KernelResidual]) -> dict[str, int]:
    """Return the number of kernels of each class that is fitted."""
    counts: dict[str, int] = {}
    for residual in residuals:
        counts[residual.cost_class] = counts.get(residual.cost_class, 0) + 1
    return {
        name: count
        for name, count in sorted(counts.items())
        if count >= FEWEST and name != "matmul (float32)"
    }


def _compute_logs(values: Mapping[str, float]) -> dict[str, float]:
    return {name: math.log(value) for name, value in values.items()}


def _make_efficiency(point: Mapping[str, float], start: Efficiency) -> Efficiency:
    values = {name: math.exp(value) for name, value in point.items()}
    for name in AT_LEAST_ONE:
        values[name] = max(values[name], 1.0)
    values["hbm_write"] = min(values["hbm_write"], PRIORS.hbm_write)
    values["l2_none"] = max(values["l2_none"], values["l2_full"] * 1.1)
    constants = Constants(**{name: values[name] for name in asdict(PRIORS)})
    classes = dict(start.classes)
    low, high = RATE_BOUNDS
    for name, value in values.items():
        if name.startswith("rate "):
            cost_class = name.removeprefix("rate ")
            limit = 1.0 if cost_class in CUBE_CLASSES else high
            rate = min(max(value, low), limit)
            classes[cost_class] = replace(classes[cost_class], rate=rate)
    return Efficiency(constants, MappingProxyType(classes))


def _compute_misfit(residuals: Sequence[KernelResidual]) -> float:
    return sum(
        _huber(residual.log_ratio) * residual.measured_us / (residual.measured_us + SHORT_US)
        for residual in residuals
    )


def _huber(value: float) -> float:
    size = abs(value)
    return size * size / 2 / HUBER if size <= HUBER else size - HUBER / 2


def _compute_distance(point: Mapping[str, float], origin: Mapping[str, float]) -> float:
    return sum(
        ((value - origin[name]) / (RATE_SD if name.startswith("rate ") else CONSTANT_SD)) ** 2 / 2
        for name, value in point.items()
    )


def _add_spread(
    efficiency: Efficiency, counts: Mapping[str, int], traces: Sequence[Trace], hw: Hardware
) -> Efficiency:
    """Return the efficiency with each fitted class's spread and source, rounded as in the file."""
    residuals = measure_residuals(traces, hw, efficiency)
    classes = dict(efficiency.classes)
    for name, count in counts.items():
        sizes = [min(abs(r.log_ratio), 1.0) for r in residuals if r.cost_class == name]
        log_sd = max(1.25 * fmean(sizes), LEAST_SD)
        source = f"{count} kernels of public traces (benchmarks/ascend_fit/kernels.csv)"
        rate = float(f"{classes[name].rate:.3g}")
        classes[name] = ClassEfficiency(rate, round(log_sd, 2), "measured", source)
    constants = {name: float(f"{v:.3g}") for name, v in asdict(efficiency.constants).items()}
    return Efficiency(Constants(**constants), MappingProxyType(classes))


def summarise(residuals: Sequence[KernelResidual], efficiency: Efficiency) -> list[ClassFit]:
    """Return one row for each class of the traces."""
    names = sorted({residual.cost_class for residual in residuals})
    return [_summarise_class(name, residuals, efficiency) for name in names]


def _summarise_class(
    name: str, residuals: Sequence[KernelResidual], efficiency: Efficiency
) -> ClassFit:
    kernels = [residual for residual in residuals if residual.cost_class == name]
    logs = [kernel.log_ratio for kernel in kernels]
    middle = median(logs)
    total = sum(k.measured_us for k in kernels) / sum(k.modelled_us for k in kernels)
    entry = efficiency.classes.get(name)
    return ClassFit(
        name,
        len(kernels),
        entry.rate if entry else 1.0,
        math.exp(middle),
        median(abs(value - middle) for value in logs),
        total,
    )


def write_efficiency(efficiency: Efficiency, path: Path = EFFICIENCY_FILE) -> None:
    """Write the file that `load_efficiency` reads."""
    head = "# Written by python -m benchmarks.ascend_fit.fit_kernels; fields: efficiency.py.\n"
    document = {
        "constants": asdict(efficiency.constants),
        "classes": {name: asdict(entry) for name, entry in efficiency.classes.items()},
    }
    path.write_text(head + yaml.safe_dump(document, sort_keys=False, width=100))


def main() -> None:
    """Fit, write efficiency.yaml, print a row for each class and trace."""
    hw = extract_hardware(load_chip("ascend910"))
    traces = read_traces()
    efficiency = fit(traces, hw, load_efficiency())
    write_efficiency(efficiency)
    residuals = measure_residuals(traces, hw, efficiency)
    print(f"{'class':18} {'n':>4} {'rate':>6} {'median':>7} {'MAD':>5} {'total':>6}")
    for row in summarise(residuals, efficiency):
        print(
            f"{row.cost_class:18} {row.count:4} {row.rate:6.2f} {row.median_ratio:7.2f}"
            f" {row.mad:5.2f} {row.total_ratio:6.2f}"
        )
    for trace in traces:
        kernels = [residual for residual in residuals if residual.trace == trace.name]
        measured_us = sum(kernel.measured_us for kernel in kernels)
        modelled_us = sum(kernel.modelled_us for kernel in kernels)
        print(f"{trace.name}: measured {measured_us:.0f} us, modelled {modelled_us:.0f} us")


if __name__ == "__main__":
    main()
