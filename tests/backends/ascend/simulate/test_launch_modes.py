"""Launch modes by hand on two ops, all-reduces under the backward pass, and laws on any graph."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import given, settings

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import MODES, OptionError, StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.cost.collectives import all_reduce_us
from pipeline.backends.ascend.simulate.launch_modes import schedule
from pipeline.backends.ascend.simulate.streams import assign_streams
from pipeline.backends.ascend.simulate.timeline import Timeline
from tests.backends.ascend.made_up import BARE, HW, chain, graphs, network, options, task, timed

EPSILON_US = 1e-6


def step_us(graph: TaskGraph, times: Sequence[TaskTime], hw: Hardware, **fields: object) -> float:
    return schedule(graph, times, hw, StepOptions(**fields)).step_us  # type: ignore[arg-type]


def test_loop_sink_time_of_two_ops() -> None:
    graph, times = chain(100.0, 50.0)
    on_device = 100 + 50 + 2 * 0.11 + 259
    assert step_us(graph, times, HW, sink_size=1) == pytest.approx(on_device + 1500 + 242)
    assert step_us(graph, times, HW, sink_size=10) == pytest.approx(on_device + 174.2)
    assert step_us(graph, times, HW, sink_size=10**6) == pytest.approx(on_device, abs=0.01)


def test_graph_sink_time_of_two_ops() -> None:
    graph, times = chain(100.0, 50.0)
    expected = 1500 + 242 + 259 + 150.22
    assert step_us(graph, times, HW, mode="graph_sink") == pytest.approx(expected)


def test_op_by_op_time_of_two_ops() -> None:
    graph, times = chain(100.0, 50.0)
    # Two launches take the host longer than the device takes for both ops.
    line = schedule(graph, times, HW, StepOptions(mode="op_by_op"))
    assert line.step_us == pytest.approx(1500 + 259 + 242 + 230)
    assert line.bound == "host launch"
    # Launches of 80 us are done while the first op still runs.
    quick = schedule(graph, times, HW, StepOptions(mode="op_by_op", op_launch_us=80.0))
    assert quick.step_us == pytest.approx(1500 + 259 + 242 + 150.22)
    assert [span.name for span in quick.spans if span.stream == "host"] == [
        "Callbacks and launch",
        "Launch MatMul",
        "Launch MatMul",
    ]


def test_op_by_op_time_is_bound_by_launches_or_by_ops() -> None:
    graph, times = chain(*[10.0] * 100)
    assert step_us(graph, times, BARE, mode="op_by_op") == pytest.approx(100 * 230)
    graph, times = chain(*[1000.0] * 100)
    assert step_us(graph, times, BARE, mode="op_by_op") == pytest.approx(100 * 1000)


def test_host_launches_overlap_with_the_all_reduce() -> None:
    """Ops of 100 us would starve each time, but launches go on while gradients are reduced."""
    graph, times = network(20, 100.0, 10_000_000)
    chosen = StepOptions(mode="op_by_op", devices=8, op_launch_us=200.0)
    line = schedule(graph, times, BARE, chosen)
    on_device_us = 21 * 100 + all_reduce_us(200_000_000, 8, BARE) + 20 * 5
    assert on_device_us > 42 * 200
    assert line.step_us == pytest.approx(on_device_us)
    assert line.bound == "communication"
    slow = schedule(graph, times, BARE, replace(chosen, op_launch_us=400.0))
    assert slow.step_us == pytest.approx(42 * 400)
    assert slow.bound == "host launch"
    # However far ahead, a step waits for its callbacks, its batch and its first launch.
    whole = schedule(graph, times, HW, chosen)
    assert whole.iteration.interval_us == pytest.approx(1500 + 515 + 242 + 0.11)


def test_scan_time_is_proportional_to_its_iterations() -> None:
    graph, times = chain(10.0, repeat=12)
    assert step_us(graph, times, BARE) == pytest.approx(120)
    assert step_us(graph, times, replace(BARE, task_gap_us=1.0)) == pytest.approx(132)
    assert step_us(graph, times, BARE, mode="op_by_op") == pytest.approx(12 * 230)


def test_empty_graph_time_is_the_launch() -> None:
    empty = TaskGraph((), ())
    line = schedule(empty, (), HW, StepOptions(mode="graph_sink"))
    assert line.step_us == pytest.approx(1500 + 242 + 259)
    assert line.iteration.fp_bp_us == 0


def test_dropout_masks_overlap_with_the_cores() -> None:
    tasks = (
        task(writes=(0,)),
        task("ai_cpu", writes=(1,)),
        task("vector", reads=(0, 1), writes=(2,)),
    )
    graph = TaskGraph((), tasks)
    late = schedule(graph, [timed(100), timed(400), timed(10)], HW, StepOptions(sink_size=10**9))
    assert late.device_us == pytest.approx(400 + 17 + 0.11 + 10)
    assert late.exposed_us["ai_cpu"] == pytest.approx(417 - 100.11)
    early = schedule(graph, [timed(900), timed(400), timed(10)], HW, StepOptions(sink_size=10**9))
    assert early.device_us == pytest.approx(900 + 10 + 0.22)
    assert early.exposed_us["ai_cpu"] == 0


def test_dropout_masks_are_sequential() -> None:
    tasks = tuple(task("ai_cpu", writes=(number,)) for number in range(3))
    graph, times = TaskGraph((), tasks), [timed(300)] * 3
    assert schedule(graph, times, HW, StepOptions()).device_us == pytest.approx(900)


def test_single_all_reduce_follows_the_backward_pass() -> None:
    graph, times = network(10, 100.0, 10_000_000)
    line = schedule(graph, times, BARE, StepOptions(devices=8, sink_size=10**9))
    reduce_us = all_reduce_us(100_000_000, 8, BARE)
    assert line.device_us == pytest.approx(11 * 100 + reduce_us + 10 * 5)
    assert line.iteration.fp_bp_us == pytest.approx(1100)
    assert line.iteration.tail_us == pytest.approx(reduce_us + 50)
    assert line.exposed_us["communication"] == pytest.approx(reduce_us)


def test_first_of_two_all_reduces_overlaps_with_the_backward_pass() -> None:
    graph, times = network(10, 1000.0, 10_000_000)
    late, early = StepOptions(devices=8, sink_size=10**9), (4, 9)
    split = schedule(graph, times, BARE, replace(late, fusion=early))
    first, second = (span for span in split.spans if span.stream == "hccl")
    alone = all_reduce_us(50_000_000, 8, BARE)
    begin = 6 * 1000.0
    # Beside the five tasks that are left it gets 1/2.4 of its speed, after them all of it.
    assert first.start_us == pytest.approx(begin, abs=0.01)
    assert first.duration_us == pytest.approx(alone + 5000 * (1 - 1 / 2.4))
    # The second runs beside the updates of the first.
    assert second.start_us == pytest.approx(first.end_us)
    assert second.duration_us == pytest.approx(alone + 25 * (1 - 1 / 2.4))
    assert split.step_us < schedule(graph, times, BARE, late).step_us


def test_resnet50_with_two_all_reduces_matches_published_times() -> None:
    """MindSpore r1.5, case 3: tail 6.15 -> 4.20 ms, step 23.61 -> 22.00, 7.45 ms for both."""
    # 161 gradients, 12 MB of them of parameters 0..85, ready within 11.8 ms.
    sizes = [90_000_000 // 75] * 75 + [12_000_000 // 86] * 86
    graph, times = network(161, 11_800 / 161, 1)
    gradients = tuple(
        (name, size, at) for (name, _, at), size in zip(graph.gradients, sizes, strict=True)
    )
    graph = replace(graph, gradients=gradients)
    times[0] = timed(5_900)
    times[162:] = [timed(1_700 / 161)] * 161
    one = schedule(graph, times, HW, StepOptions(devices=8, sink_size=1000))
    two = schedule(graph, times, HW, StepOptions(devices=8, sink_size=1000, fusion=(85, 160)))
    assert one.iteration.tail_us / 1e3 == pytest.approx(6.15, rel=0.1)
    assert two.iteration.tail_us / 1e3 == pytest.approx(4.20, rel=0.3)
    both = sum(span.duration_us for span in two.spans if span.stream == "hccl")
    assert both / 1e3 == pytest.approx(7.45, rel=0.25)


def test_updates_run_in_the_order_in_which_their_gradients_arrive() -> None:
    graph, _ = network(4, 100.0, 10_000_000)
    plan = assign_streams(graph, StepOptions(devices=8, fusion=(1, 3)), HW)
    # Listed from the last to the first one ready; the first ones ready are all-reduced first.
    assert plan.order[5:] == (7, 8, 5, 6)
    assert [plan.needs[index] for index in plan.order[5:]] == [0, 0, 1, 1]


def test_gradient_conversion_is_deferred_until_the_all_reduce() -> None:
    """Lowering may write it right after the gradient; the backward pass does not wait for it."""
    tasks = (
        task(phase="backward", writes=(0,)),
        task("vector", "optimizer", cost_class="trans_data", reads=(0,), writes=(1,)),
        task(phase="backward", writes=(2,)),
        task("vector", "optimizer", cost_class="optimizer", reads=(1,), writes=(3,)),
    )
    graph = TaskGraph((), tasks, gradients=(("w", 1000, 0), ("b", 1000, 2)))
    plan = assign_streams(graph, StepOptions(devices=8), HW)
    assert plan.order == (0, 2, 1, 3)
    assert plan.needs == (-1, 0, -1, 0)
    assert plan.sources == ((0, 2),)


def test_batch_task_needs_no_launch() -> None:
    """The interval between steps has GetNext and its event already."""
    tasks = (
        task("ai_cpu", "data", type="GetNext", writes=(0,)),
        task(reads=(0,), writes=(1,)),
    )
    graph, times = TaskGraph((), tasks), [timed(0), timed(100)]
    alone, its_times = chain(100.0)
    for mode in MODES:
        chosen = StepOptions(mode=mode)
        assert schedule(graph, times, HW, chosen).step_us == pytest.approx(
            schedule(alone, its_times, HW, chosen).step_us
        )


def test_two_optimizers_have_separate_all_reduces() -> None:
    """An adversary is updated before the other network's backward pass; one bucket can't be."""
    tasks = [task(phase="backward", writes=(0,))]
    tasks.append(task("vector", "optimizer", cost_class="optimizer", reads=(0,), writes=(1,)))
    tasks.append(task(phase="backward", reads=(1,), writes=(2,)))
    tasks.append(task("vector", "optimizer", cost_class="optimizer", reads=(2,), writes=(3,)))
    gradients = (("d", 22_000_000, 0), ("g", 22_000_000, 2))
    graph = TaskGraph((), tuple(tasks), gradients=gradients)
    line = schedule(graph, [timed(100)] * 4, BARE, StepOptions(devices=2, sink_size=10**9))
    assert line.device_us == pytest.approx(4 * 100 + 2 * (4.4 + 1000))
    # More of the other network that depends on the first update makes no third round.
    more = replace(
        graph,
        tasks=(*tasks[:3], task(phase="backward", reads=(1,), writes=(4,)), tasks[3]),
        gradients=(*gradients, ("g2", 22_000_000, 3)),
    )
    assert assign_streams(more, StepOptions(devices=2), HW).sources == ((0,), (2, 3))


def test_gradient_completed_by_the_optimizer_is_reduced_after_it() -> None:
    tasks = (
        task(phase="backward", writes=(0,)),
        task("vector", "optimizer", reads=(0,), writes=(1,)),
        task("vector", "optimizer", cost_class="optimizer", reads=(1,), writes=(2,)),
    )
    graph = TaskGraph((), tasks, gradients=(("w", 22_000_000, 1),))
    plan = assign_streams(graph, StepOptions(devices=2), HW)
    assert plan.needs == (-1, -1, 0)
    assert plan.order == (0, 1, 2)


def test_update_of_unknown_gradient_waits_for_last_all_reduce() -> None:
    tasks = (
        task(phase="backward", writes=(0,)),
        task("vector", "optimizer", cost_class="optimizer", reads=(9,), writes=(1,)),
    )
    graph = TaskGraph((), tasks, gradients=(("w", 22_000_000, 0),))
    line = schedule(graph, [timed(100)] * 2, BARE, StepOptions(devices=2, sink_size=10**9))
    assert line.device_us == pytest.approx(200 + 4.4 + 1000)


def test_step_bound_is_the_limiting_resource() -> None:
    graph, times = chain(1000.0)
    assert schedule(graph, times, HW, StepOptions(sink_size=1000)).bound == "cube"
    slow = [replace(times[0], bound="memory")]
    assert schedule(graph, slow, HW, StepOptions(sink_size=1000)).bound == "memory"
    assert schedule(graph, times, HW, StepOptions(mode="graph_sink")).bound == "host launch"
    graph, times = chain(1000.0, engine="vector", cost_class="trans_data")
    assert schedule(graph, times, HW, StepOptions(sink_size=1000)).bound == "format"
    graph, times = chain(10.0)
    assert schedule(graph, times, HW, StepOptions(sink_size=1000)).bound == "interval"


def test_invalid_options_are_errors() -> None:
    graph, times = chain(1.0)
    with pytest.raises(OptionError, match="devices = 0: must be at least 1"):
        StepOptions(devices=0)
    with pytest.raises(OptionError, match="sink_size = -1: must be at least 1"):
        StepOptions(sink_size=-1)
    with pytest.raises(OptionError, match="host_images_per_s = nan: must be above 0"):
        StepOptions(host_images_per_s=float("nan"))
    with pytest.raises(OptionError, match="op_launch_us = -1: must be at least 0"):
        StepOptions(op_launch_us=-1)
    with pytest.raises(OptionError, match="'loop': must be one of op_by_op, graph_sink, loop_sink"):
        StepOptions(mode="loop")  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="devices = 12: must fill whole servers"):
        schedule(graph, times, HW, StepOptions(devices=12))


@pytest.mark.slow
def test_schedule_of_2000_tasks_is_fast_on_any_number_of_devices() -> None:
    graph, times = network(1000, 10.0, 100_000)

    def spent_s(devices: int) -> float:
        begin = time.perf_counter()
        schedule(graph, times, HW, StepOptions(devices=devices))
        return time.perf_counter() - begin

    for devices in (8, 1024):
        assert min(spent_s(devices) for _ in range(5)) < 0.1


Case = tuple[TaskGraph, tuple[TaskTime, ...]]


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=300, deadline=None)
def test_loop_sink_is_fastest_and_op_by_op_slowest(case: Case, chosen: StepOptions) -> None:
    by_mode = {mode: schedule(*case, HW, replace(chosen, mode=mode)).step_us for mode in MODES}
    assert by_mode["loop_sink"] <= by_mode["graph_sink"] + EPSILON_US
    assert by_mode["graph_sink"] <= by_mode["op_by_op"] + EPSILON_US


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=150, deadline=None)
def test_step_is_between_critical_path_and_sequential_time(case: Case, chosen: StepOptions) -> None:
    graph, times = case
    longest = max((time.us * task.repeat for task, time in _pairs(case)), default=0.0)
    for mode in MODES:
        line = schedule(graph, times, HW, replace(chosen, mode=mode))
        assert longest <= line.critical_path_us + EPSILON_US
        assert line.critical_path_us <= line.device_us + EPSILON_US
        assert line.device_us <= line.step_us + EPSILON_US
        assert line.step_us <= _in_sequence_us(case, chosen, line) + EPSILON_US


def _pairs(case: Case) -> list[tuple[object, TaskTime]]:
    return list(zip(case[0].tasks, case[1], strict=True))  # type: ignore[arg-type]


def _in_sequence_us(case: Case, chosen: StepOptions, line: Timeline) -> float:
    graph, times = case
    launch_us = HW.op_launch_us if chosen.op_launch_us is None else chosen.op_launch_us
    total = HW.host_step_us + 2 * HW.graph_launch_us + HW.sink_interval_distributed_us
    for one, time_ in zip(graph.tasks, times, strict=True):
        total += one.repeat * (time_.us + HW.task_gap_us + launch_us)
        total += 2 * HW.event_handover_us + HW.collective_launch_us
    for span in line.spans:
        if span.stream == "hccl" and span.task is None:
            total += span.duration_us + launch_us + HW.collective_launch_us
            total += HW.event_handover_us
    preparing_us = chosen.batch_size / (chosen.host_images_per_s or 1e12) * 1e6
    return total + launch_us + preparing_us + chosen.batch_bytes / (HW.pcie_gb_per_s * 1e3)


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=150, deadline=None)
def test_exposed_times_add_up_to_the_step(case: Case, chosen: StepOptions) -> None:
    for mode in MODES:
        line = schedule(*case, HW, replace(chosen, mode=mode))
        assert sum(line.exposed_us.values()) == pytest.approx(line.step_us)
        assert min(line.exposed_us.values()) >= 0
        assert line.iteration.iteration_us == pytest.approx(line.step_us)
        assert line.iteration.interval_us >= 0
        assert line.iteration.tail_us >= -EPSILON_US
        launches_us = sum(span.duration_us for span in line.spans if span.stream == "host")
        if any(one.phase != "data" for one in case[0].tasks):
            assert launches_us == pytest.approx(line.host_us)


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=150, deadline=None)
def test_spans_of_a_stream_do_not_overlap(case: Case, chosen: StepOptions) -> None:
    for mode in MODES:
        line = schedule(*case, HW, replace(chosen, mode=mode))
        for first, second in pairwise(line.spans):
            if first.stream == second.stream:
                assert first.end_us <= second.start_us + EPSILON_US
        for span in line.spans:
            assert span.start_us >= 0
            assert span.end_us <= line.step_us + EPSILON_US


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=150, deadline=None)
def test_tasks_run_after_their_dependencies(case: Case, chosen: StepOptions) -> None:
    fusion = tuple(range(0, len(case[0].gradients), 2)) or None
    plan = assign_streams(case[0], replace(chosen, fusion=fusion), HW)
    assert sorted(plan.order) == list(range(len(case[0].tasks)))
    place = {index: number for number, index in enumerate(plan.order)}
    for index, number in place.items():
        before = [*plan.producers[index]]
        for bucket in range(plan.needs[index] + 1):
            before += plan.sources[bucket]
        assert all(place[other] < number for other in before)


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=150, deadline=None)
def test_task_ends_match_a_recursive_calculation(case: Case, chosen: StepOptions) -> None:
    """One device: the recurrence written down from a task's point of view."""
    graph, times = case
    chosen = replace(chosen, devices=1)
    lanes = ["compute" if one.engine in ("cube", "vector") else one.engine for one in graph.tasks]
    writer = {buffer: index for index, one in enumerate(graph.tasks) for buffer in one.writes}
    order = assign_streams(graph, chosen, HW).order

    @cache
    def end_us(index: int) -> float:
        lane, one = lanes[index], graph.tasks[index]
        before = [other for other in order[: order.index(index)] if lanes[other] == lane]
        free = end_us(before[-1]) if before else 0.0
        owed = [end_us(writer[buffer]) + 17.0 for buffer in one.reads
                if lanes[writer[buffer]] != lane or lane == "ai_cpu"]  # fmt: skip
        ready = max(owed, default=0.0)
        if lane == "hccl":
            return max(free, ready + 20.0) + times[index].us * one.repeat
        gap = 0.11 if lane == "compute" else 0.0
        return max(free, ready) + (times[index].us + gap) * one.repeat

    line = schedule(graph, times, HW, replace(chosen, mode="loop_sink"))
    expected = max((end_us(index) for index in range(len(graph.tasks))), default=0.0)
    assert line.device_us == pytest.approx(expected)


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=100, deadline=None)
def test_schedule_is_deterministic(case: Case, chosen: StepOptions) -> None:
    assert schedule(*case, HW, chosen) == schedule(*case, HW, chosen)
