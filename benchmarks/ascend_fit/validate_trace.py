"""Compare a traced step's kernels: `python -m benchmarks.ascend_fit.validate_trace`.

The modelled AlexNet step is compared with every kernel of a published trace of the same step.

The trace (msprof, 2023: MindSpore's AlexNet for CIFAR-10, batch 32 on each of 8 devices) also
normalises and transposes its images on the device, by four kernels of 317 us in sum. The modelled
step does this on the host, so the sums skip them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from benchmarks.ascend_fit.measured_kernels import read_traces
from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.cost.efficiency import Calibration, load_calibration
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.published.workloads import trace_image_step
from pipeline.backends.ascend.report.priced_step import PricedStep

TRACE = "alexnet_b32_2023"
ON_THE_HOST = ("Cast-op239", "Sub-op5", "RealDiv-op6", "Transpose-op524")
PHASES_MS = {"forward and backward": 4.27 - 0.317, "all-reduce": 9.30, "update": 1.69}
STEP_MS = 15.375
"""Median of 9 steps of the trace's step_trace; the first phase without the skipped kernels."""


@dataclass(frozen=True)
class Compared:
    """A line: traced and modelled value, in the same unit."""

    name: str
    published: float
    modelled: float

    @property
    def ratio(self) -> float:
        """Modelled by published."""
        return self.modelled / self.published


def price_alexnet(calibration: Calibration) -> PricedStep:
    """Return the traced step, priced."""
    traced = trace_image_step("alexnet", 32, 227, 10)
    pricing = Pricing(traced, chipset("ascend910"), calibration)
    return pricing.price_step(ExecutionConfig(devices=8))


def compare_step(step: PricedStep) -> list[Compared]:
    """Compare the step and its phases, in ms."""
    phases = step.phases
    modelled = {
        "forward and backward": step.iteration.fp_bp_us / 1e3,
        "all-reduce": phases["communication"],
        "update": phases["optimizer"],
    }
    parts = [Compared(name, ms, modelled[name]) for name, ms in PHASES_MS.items()]
    return [Compared("step", STEP_MS, step.step_ms), *parts]


def compare_classes(step: PricedStep) -> list[Compared]:
    """Compare kernels by class, in us."""
    (trace,) = [trace for trace in read_traces() if trace.name == TRACE]
    published: dict[str, float] = defaultdict(float)
    for kernel, task in zip(trace.kernels, trace.graph.tasks, strict=True):
        if kernel.name not in ON_THE_HOST:
            published[task.cost_class] += kernel.us
    modelled: dict[str, float] = defaultdict(float)
    for cost in step.tasks:
        modelled[cost.task.cost_class] += cost.us
    return [
        Compared(name, us, modelled[name])
        for name, us in sorted(published.items(), key=lambda item: -item[1])
    ]


def lines(step: PricedStep) -> Iterator[str]:
    """Yield the comparison as lines of text."""
    for name, unit, rows in (
        ("AlexNet's trace", "ms", compare_step(step)),
        ("its kernels", "us", compare_classes(step)),
    ):
        yield f"{name:22} {'published':>10} {'modelled':>10}  ratio"
        for row in rows:
            values = f"{row.published:7.2f} {unit} {row.modelled:7.2f} {unit}"
            yield f"  {row.name:20} {values}  {row.ratio:5.2f}"


if __name__ == "__main__":
    print("\n".join(lines(price_alexnet(load_calibration()))))
