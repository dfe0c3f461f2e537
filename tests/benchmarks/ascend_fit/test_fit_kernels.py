"""The fit to timed kernels recovers constants and ignores outliers; traces are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.ascend_fit.fit_kernels import (
    PRIORS,
    fit,
    measure_residuals,
    summarise,
    write_efficiency,
)
from benchmarks.ascend_fit.measured_kernels import MeasuredKernel, Trace, read_traces
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.cost.efficiency import load_efficiency
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.core.errors import RunError
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.products import buffer, stream

START = load_efficiency()
HEAD = "trace,kernel,type,cost_class,us,cores,reads,writes,cube,vector\n"


def _casts(slowdown: float, outlier: float = 1.0) -> Trace:
    """Casts of many sizes that take `slowdown` times what the start of the fit has for them."""
    start = replace(START.scale_rates({"cast": 1 / START.classes["cast"].rate}), constants=PRIORS)
    buffers, tasks, kernels = [], [], []
    for at in range(8):
        shape = (10_000_000 * (at + 1),)
        buffers += [buffer(2 * at, shape), buffer(2 * at + 1, shape)]
        task = stream("cast", shape[0]).tasks[0]
        tasks.append(replace(task, reads=(2 * at,), writes=(2 * at + 1,)))
    graph = TaskGraph(tuple(buffers), tuple(tasks))
    for at, time in enumerate(price_tasks(graph, HW, start)):
        us = time.us * slowdown * (outlier if at == 3 else 1.0)
        kernels.append(MeasuredKernel(f"Cast-op{at}", us, 32))
    return Trace("made up", tuple(kernels), graph)


@pytest.mark.parametrize("slowdown", [0.85, 1.0, 1.3])
def test_fit_matches_consistent_kernels(slowdown: float) -> None:
    trace = _casts(slowdown)
    fitted = fit([trace], HW, START)
    (row,) = summarise(measure_residuals([trace], HW, fitted), fitted)
    assert (row.cost_class, row.count) == ("cast", 8)
    assert row.median_ratio == pytest.approx(1.0, abs=0.05)
    assert row.mad < 0.03


@pytest.mark.medium
def test_outlier_kernel_changes_the_fit_little() -> None:
    plain, strange = (fit([_casts(1.2, outlier)], HW, START) for outlier in (1.0, 8.0))
    graph = _casts(1.2).graph
    for one, other in zip(
        price_tasks(graph, HW, plain), price_tasks(graph, HW, strange), strict=True
    ):
        assert other.us == pytest.approx(one.us, rel=0.1)


def test_classes_without_kernels_keep_their_efficiency() -> None:
    fitted = fit([_casts(1.0)], HW, START)
    assert fitted.classes["depthwise"] == START.classes["depthwise"]
    assert fitted.classes["cast"].provenance == "measured"


def test_shipped_traces_are_complete() -> None:
    """One step each of AlexNet and of Wide & Deep, and of AlexNet in float32."""
    traces = {trace.name: trace for trace in read_traces()}
    assert set(traces) == {"alexnet_b32_2023", "wide_deep_2020", "alexnet_b2_fp32_2020"}
    sizes = {name: len(trace.kernels) for name, trace in traces.items()}
    assert min(sizes.values()) > 90
    gradients = [
        task.cube for task in traces["alexnet_b32_2023"].graph.tasks if task.type == "MatMul"
    ]
    assert sum(work.macs for work in gradients if work and work.k == 32) == 32 * (
        4096 * 9216 + 4096 * 4096 + 10 * 4096
    )


def test_buffers_of_a_trace_are_matched_by_name(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    row = "t,Cast-op{},Cast,cast,5.0,32,{}:float16:8x4:ND,{}:float16:8x4:ND,,32 float16 1 0\n"
    path.write_text(HEAD + row.format(0, "a", "b") + row.format(1, "b", "c"))
    (trace,) = read_traces(path)
    first, second = trace.graph.tasks
    assert first.writes == second.reads
    assert trace.graph.buffers[0].nbytes == 64


def test_trace_row_of_an_unknown_class_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    path.write_text(HEAD + "t,Cast-op0,Cast,kast,5.0,32,,,,\n")
    with pytest.raises(RunError, match=r"kernels\.csv:2: no cost class 'kast'"):
        read_traces(path)


def test_efficiencies_are_unchanged_after_writing_and_loading(tmp_path: Path) -> None:
    path = tmp_path / "efficiency.yaml"
    write_efficiency(START, path)
    again = load_efficiency(path)
    assert again.constants == START.constants
    assert dict(again.classes) == dict(START.classes)
