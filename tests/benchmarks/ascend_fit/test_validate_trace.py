"""The modelled step of AlexNet against its trace, and the timed kernels against the model."""

from __future__ import annotations

import math
from statistics import median

import pytest

from benchmarks.ascend_fit.fit_kernels import measure_residuals, summarise
from benchmarks.ascend_fit.measured_kernels import read_traces
from benchmarks.ascend_fit.validate_trace import (
    compare_classes,
    compare_step,
    lines,
    price_alexnet,
)
from pipeline.backends.ascend.cost.efficiency import load_calibration, load_efficiency
from tests.backends.ascend.made_up import HW

EFFICIENCY = load_efficiency()


@pytest.mark.slow
def test_alexnet_step_matches_its_trace():
    """The goals: the step within 15 %, phases 25 %, classes of kernels 35 % in the median."""
    report = price_alexnet(load_calibration())
    step, *phases = compare_step(report)
    assert abs(step.ratio - 1) < 0.15
    assert all(abs(phase.ratio - 1) < 0.25 for phase in phases)
    classes = compare_classes(report)
    assert median(abs(one.ratio - 1) for one in classes) < 0.35
    assert sum(one.published for one in classes) == pytest.approx(5848 - 317, abs=5)
    assert len(list(lines(report))) == 2 + len(classes) + len(phases) + 1


def test_kernel_times_of_the_2023_trace_are_within_35_percent() -> None:
    """A step of AlexNet: in sum within 15 %, the median of a class within 35 %."""
    (trace,) = (trace for trace in read_traces() if trace.name == "alexnet_b32_2023")
    residuals = measure_residuals([trace], HW, EFFICIENCY)
    measured, modelled = (
        sum(getattr(residual, key) for residual in residuals)
        for key in ("measured_us", "modelled_us")
    )
    assert modelled == pytest.approx(measured, rel=0.15)
    rows = [row for row in summarise(residuals, EFFICIENCY) if row.count > 2]
    assert len(rows) >= 10
    assert all(1 / 1.35 < row.median_ratio < 1.35 for row in rows)
    assert median(abs(math.log(row.median_ratio)) for row in rows) < 0.12
