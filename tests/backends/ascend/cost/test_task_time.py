"""Times of tasks: closed forms, the roofline, monotonicity, dimensions, the L2, timed kernels."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from typing import get_args

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import CostClass, Provenance, Task, TaskGraph, VectorWork
from pipeline.backends.ascend.cost.efficiency import load_efficiency
from pipeline.backends.ascend.cost.task_time import price_tasks
from pipeline.backends.ascend.cost.tiling import Tiling
from tests.backends.ascend.made_up import HW
from tests.backends.ascend.products import (
    FAST_MEMORY,
    FLAT,
    buffer,
    convolution,
    feature_map_task,
    graph_of,
    matmul,
    row_task,
    stream,
)

EFFICIENCY = load_efficiency()
CONSTANTS = EFFICIENCY.constants
RATES = (
    "ai_core_clock_mhz",
    "hbm_nominal_gb_per_s",
    "hbm_sustained_gb_per_s",
    "fp32_matmul_gmacs_per_s",
)
OVERHEADS = ("task_floor_one_core_us", "task_floor_all_cores_us", "ai_cpu_task_us")
BETTER = (
    *RATES,
    "vector_bytes_per_cycle",
    "l1_to_l0a_bytes_per_cycle",
    "l1_to_l0b_bytes_per_cycle",
    "l0c_to_ub_bytes_per_cycle",
    "ub_to_l2_bytes_per_cycle",
    "l2_read_bytes_per_cycle",
    "l2_write_bytes_per_cycle",
    "l2_mib",
)

lengths = st.integers(1, 3000)
edges, channels = st.integers(1, 60), st.integers(1, 300)
graphs = st.one_of(
    st.builds(matmul, lengths, lengths, lengths, st.sampled_from(("float16", "float32"))),
    st.builds(
        convolution,
        st.sampled_from(("conv", "conv_input_grad", "conv_kernel_grad", "depthwise")),
        st.integers(1, 64),
        edges,
        channels,
        channels,
        st.sampled_from((1, 9, 49)),
    ),
    st.builds(
        stream,
        st.sampled_from(("elementwise", "cast", "optimizer", "bn_update", "copy", "sort", "rows")),
        st.integers(1, 10**8),
        st.floats(0, 30),
    ),
    st.builds(
        feature_map_task,
        st.sampled_from(("max_pool", "max_pool_grad", "avg_pool", "bias_grad")),
        st.integers(1, 64),
        edges,
        channels,
    ),
    st.builds(
        row_task, st.sampled_from(("gather", "scatter")), st.integers(1, 10**6), st.integers(1, 64)
    ),
)


def us(graph: TaskGraph, hw: Hardware = HW) -> float:
    return sum(time.us for time in price_tasks(graph, hw))


def test_product_time_is_compute_bound_with_fast_memory() -> None:
    blocks = 256**3
    rate = EFFICIENCY.classes["matmul"].rate
    expected = HW.task_floor_all_cores_us + blocks / (32 * HW.ai_core_clock_mhz) / rate
    assert us(matmul(4096, 4096, 4096), FAST_MEMORY) == pytest.approx(expected, rel=0.02)


def test_stream_time_is_reads_and_writes_at_their_rates() -> None:
    nbytes, shape = 400_000_000, ((200_000_000,), "float16")
    graph = graph_of("copy", [shape, shape], shape)
    rate = EFFICIENCY.classes["copy"].rate
    traffic_us = 2 * nbytes / 1e6 / CONSTANTS.hbm_read + nbytes / 1e6 / CONSTANTS.hbm_write
    expected = HW.task_floor_all_cores_us + traffic_us / rate
    assert us(graph) == pytest.approx(expected)


def test_elementwise_task_with_many_operations_is_vector_bound() -> None:
    graph = stream("elementwise", 10**6, simple=1000.0)
    lanes_us = 10**6 * 2 * 1000 / HW.vector_bytes_per_us / CONSTANTS.vector_rate
    time = price_tasks(graph, HW)[0]
    expected = HW.task_floor_all_cores_us + lanes_us / EFFICIENCY.classes["elementwise"].rate
    assert time.bound == "vector"
    assert time.us == pytest.approx(expected, rel=0.001)


def test_float32_product_runs_on_the_vector_unit() -> None:
    """The trace of 2020 has 9174 us for 2 x 9216 x 4096 on one core."""
    time = price_tasks(matmul(2, 9216, 4096, "float32"), HW)[0]
    floor_us = 1.5 + (4.2 - 1.5) / 32
    assert time.us == pytest.approx(floor_us + 2 * 9216 * 4096 / 8.2e3)
    assert time.us == pytest.approx(9174, rel=0.05)
    assert time.bound == "vector"


def test_convolution_time_is_independent_of_its_dtype() -> None:
    graph = convolution("conv", 32, 13, 256, 256)
    task = graph.tasks[0]
    assert task.cube is not None
    wide = replace(graph, tasks=(replace(task, cube=replace(task.cube, dtype="float32")),))
    assert us(wide) == us(graph)


def test_ai_cpu_task_has_a_fixed_time_and_link_task_takes_zero() -> None:
    shape = ((8,), "float32")
    ai_cpu = graph_of("ai_cpu", [shape], shape, engine="ai_cpu")
    link = graph_of("all_reduce", [shape], shape, engine="hccl")
    assert price_tasks(ai_cpu, HW)[0].us == HW.ai_cpu_task_us
    assert price_tasks(link, HW)[0].us == 0


def test_gathered_rows_cost_a_latency_each() -> None:
    """5 million rows of 32 bytes: 118 million a second gathered in the Wide & Deep trace."""
    time = us(row_task("gather", 4_992_000, 8))
    assert time == pytest.approx(42_218, rel=0.15)


def test_bias_gradient_of_matrix_is_faster_than_of_feature_map() -> None:
    flat = graph_of("bias_grad", [((32 * 169, 256), "float16")], ((256,), "float16"))
    assert us(feature_map_task("bias_grad", 32, 13, 256)) > 5 * us(flat)


def test_row_preserving_transpose_is_faster() -> None:
    rows, elements = ((100, 64, 128), "float16"), ((100, 128, 64), "float16")
    kept = graph_of("transpose", [rows], ((64, 100, 128), "float16"))
    torn = graph_of("transpose", [rows], elements)
    assert us(torn) > 1.5 * us(kept)


def test_layout_change_of_partial_blocks_is_slower() -> None:
    """13 x 13 planes took 14 us in the trace, 28 x 28 planes, more than twice the data, 9 us."""
    whole, odd = (
        graph_of("trans_data", [((32, 128, edge, edge), "float16")], ((32, edge, edge, 128), dtype))
        for edge, dtype in ((28, "float16"), (27, "float16"))
    )
    blocked = [
        replace(g, buffers=(g.buffers[0], replace(g.buffers[1], layout="NC1HWC0")))
        for g in (whole, odd)
    ]
    assert us(blocked[1]) > us(blocked[0])


def test_slice_of_leading_rows_reads_only_those_rows() -> None:
    table = ((100_000, 256), "float32")
    leading = graph_of("copy", [table], ((1000, 256), "float32"))
    minor = graph_of("copy", [table], ((100_000, 2), "float32"))
    assert us(leading) < us(minor) / 5


def test_columns_of_a_matrix_are_sliced_row_by_row() -> None:
    """The trace of 2020 has 0.93 to 1.13 ms for the matrix, 1.53 to 1.56 with a third axis."""
    rows = graph_of("copy", [((184_696, 64), "float32")], ((184_696, 8), "float32"))
    planes = graph_of("copy", [((128_000, 39, 64), "float32")], ((128_000, 39, 8), "float32"))
    assert 800 < us(rows) < 1200
    assert 1300 < us(planes) < 1800


def test_row_kernel_time_grows_with_operations_along_rows() -> None:
    """Softmax with cross entropy of 32 rows of 10 took 9.5 us in the trace of 2023."""

    def softmax(along_rows: int) -> TaskGraph:
        work = VectorWork(500_000, "float16", 3, 2, along_rows)
        shape = ((10_000, 50), "float16")
        return graph_of("rows", [shape], shape, vector=work)

    one, four = us(softmax(1)), us(softmax(4))
    per_row = load_efficiency().constants.minor_row_cycles / 1000
    assert four - one > 0.6 * 3 * per_row * 10_000 / 32
    assert four < 4 * one


def test_row_kernel_time_depends_on_the_rows_that_it_works_along() -> None:
    """Not on those of its buffer, of which the kernel may read a view."""

    def norm(width: int) -> TaskGraph:
        work = VectorWork(4_000_000, "float16", 3, 2, 4, rows=10_000)
        shape = ((4_000_000 // width, width), "float16")
        return graph_of("rows", [shape], shape, vector=work)

    assert us(norm(100)) == us(norm(400))


def _chain(length: int) -> TaskGraph:
    """A producer, then a consumer of its output `length` unrelated kernels later."""
    shape = (5_000_000,)
    work = VectorWork(shape[0], "float16")

    def copy(read: int, write: int) -> Task:
        return Task("Copy", "n", "vector", "forward", "copy", (read,), (write,), vector=work)

    between = [copy(3 + 2 * at, 4 + 2 * at) for at in range(length)]
    tasks = (copy(0, 1), *between, copy(1, 2))
    return TaskGraph(tuple(buffer(index, shape) for index in range(3 + 2 * length)), tasks)


def test_recent_output_is_read_from_the_l2() -> None:
    times = [price_tasks(_chain(length), HW)[-1].us for length in range(12)]
    assert times == sorted(times)
    assert times[0] < 0.75 * times[-1]
    assert times[-1] == times[-2]


def test_task_on_one_core_is_slower() -> None:
    graph = matmul(4096, 4096, 4096)
    one_core = {0: Tiling(1, 1, 1, 1, 8, 16)}
    slow = price_tasks(graph, HW, tiles=one_core)[0].us
    assert slow > 20 * us(graph)


@pytest.mark.medium
@given(graphs, st.sampled_from(BETTER), st.floats(0.1, 10))
@settings(deadline=None)
def test_task_time_is_never_below_the_roofline(
    graph: TaskGraph, figure: str, factor: float
) -> None:
    hw = replace(HW, **{figure: getattr(HW, figure) * factor})
    task, time = graph.tasks[0], price_tasks(graph, hw)[0]
    assert math.isfinite(time.us)
    assert time.us >= time.roofline_us
    if task.cube:
        assert time.us >= task.cube.macs / hw.peak_fp16_macs_per_us
    moved = sum(graph.buffers[index].nbytes for index in (*task.reads, *task.writes))
    if task.cost_class not in ("gather", "copy"):
        nominal = max(hw.hbm_nominal_gb_per_s, hw.hbm_sustained_gb_per_s) * 1e3
        assert time.us >= (moved - hw.l2_mib * 2**20) / nominal


@pytest.mark.medium
@given(graphs, st.sampled_from(BETTER), st.floats(1.01, 8))
@example(convolution("conv", 3, 10, 1, 161, 49), "l1_to_l0a_bytes_per_cycle", 2.0)
@settings(deadline=None)
def test_better_hardware_is_never_slower(graph: TaskGraph, figure: str, factor: float) -> None:
    better = replace(FLAT, **{figure: getattr(HW, figure) * factor})
    assert us(graph, better) <= us(graph, FLAT) * (1 + 1e-9)


@pytest.mark.slow
@given(graphs, st.integers(1, 40), st.integers(1, 40))
@settings(deadline=None)
def test_more_cores_are_never_slower(graph: TaskGraph, few: int, more: int) -> None:
    less, greater = (replace(FLAT, ai_cores_count=float(count)) for count in (few, few + more))
    assert us(graph, greater) <= us(graph, less) * (1 + 1e-9)


@pytest.mark.medium
@given(graphs, st.sampled_from(OVERHEADS), st.floats(1.01, 8))
@settings(deadline=None)
def test_larger_overheads_are_never_faster(graph: TaskGraph, figure: str, factor: float) -> None:
    worse = replace(HW, **{figure: getattr(HW, figure) * factor})
    assert us(graph, worse) >= us(graph) * (1 - 1e-9)


@pytest.mark.medium
@given(graphs)
@settings(deadline=None)
def test_task_time_is_halved_on_hardware_twice_as_fast(graph: TaskGraph) -> None:
    changes = {name: getattr(HW, name) * 2 for name in RATES}
    changes |= {name: getattr(HW, name) / 2 for name in OVERHEADS}
    assert us(graph, replace(HW, **changes)) == pytest.approx(us(graph) / 2)


@pytest.mark.slow
@given(lengths, lengths, lengths, st.sampled_from(("float16", "float32")), lengths)
@settings(deadline=None)
def test_longer_product_is_never_faster(m: int, k: int, n: int, dtype: str, more: int) -> None:
    base = us(matmul(m, k, n, dtype), FLAT)
    for larger in ((m + more, k, n), (m, k + more, n), (m, k, n + more)):
        assert us(matmul(*larger, dtype), FLAT) >= base * (1 - 1e-9)


@pytest.mark.medium
@given(st.integers(1, 10**8), st.integers(0, 10**7), st.floats(0, 20), st.floats(0, 20))
@settings(deadline=None)
def test_longer_stream_is_never_faster(
    elements: int, more: int, simple: float, other: float
) -> None:
    base = us(stream("elementwise", elements, simple))
    assert us(stream("elementwise", elements + more, simple + other)) >= base * (1 - 1e-9)


def test_every_class_has_a_bounded_efficiency_with_a_source() -> None:
    assert set(EFFICIENCY.classes) == set(get_args(CostClass))
    assert all(0.05 <= entry.rate <= 1.5 for entry in EFFICIENCY.classes.values())
    assert all(entry.source and entry.log_sd > 0 for entry in EFFICIENCY.classes.values())
    assert {entry.provenance for entry in EFFICIENCY.classes.values()} <= set(get_args(Provenance))


def test_scaled_cost_class_changes_only_its_tasks() -> None:
    slower = EFFICIENCY.scale_rates({"cast": 0.5})
    assert slower.classes["cast"].rate == EFFICIENCY.classes["cast"].rate / 2
    assert slower.classes["copy"].rate == EFFICIENCY.classes["copy"].rate
    assert price_tasks(stream("cast", 10**8), HW, slower)[0].us > us(stream("cast", 10**8))


def test_constants_are_positive() -> None:
    assert all(getattr(CONSTANTS, field.name) > 0 for field in fields(CONSTANTS))
    assert CONSTANTS.l2_full < CONSTANTS.l2_none
