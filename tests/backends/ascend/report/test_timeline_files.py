"""Pages: well-formed, self-contained, and true to the timeline that they show.

Traces against the Trace Event Format, and the events that a reader looks for.
"""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings

from pipeline.backends.ascend.chip.options import MODES, Mode, StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.report.priced_step import Layer, find_slowest_layers
from pipeline.backends.ascend.report.timeline_files import COLOURS, render_picture, write_trace
from pipeline.backends.ascend.simulate.launch_modes import schedule
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.core.pages.charts import WIDE
from tests.backends.ascend.made_up import HW, chain, graphs, network, options, task, timed

Event = dict[str, Any]
CATEGORIES = {"AI_CORE", "AI_CPU", "HCCL", "HOST", "ITERATION"}


def _line(mode: Mode = "loop_sink") -> tuple[Timeline, TaskGraph]:
    graph, times = network(6, 500.0, 4_000_000)
    chosen = StepOptions(
        mode=mode, sink_size=100, devices=8, batch_bytes=10_000_000, host_images_per_s=5000.0
    )
    return schedule(graph, times, HW, chosen), graph


def _elements(markup: str) -> ElementTree.Element:
    """Parse the page as XML; elements that HTML leaves open are closed first."""
    closed = re.sub(r"<(meta[^>]*)>", r"<\1/>", markup.removeprefix("<!doctype html>\n"))
    return ElementTree.fromstring(closed)


@pytest.mark.parametrize("mode", MODES)
def test_page_is_well_formed_and_self_contained(mode: Mode) -> None:
    line, graph = _line(mode)
    markup = render_picture(line, graph, "A <net> & more")
    assert _elements(markup).findtext("head/title") == "A <net> & more"
    for foreign in ("http:", "https:", "<script", "<link", "@import", "url(", " src="):
        assert foreign not in markup


def test_share_bars_are_proportional_to_time() -> None:
    line, graph = _line()
    bar = next(
        svg
        for svg in _elements(render_picture(line, graph, "step")).iter("svg")
        if svg.get("aria-label") == "Shares of the step"
    )
    widths = {rect.get("class"): float(rect.get("width", "nan")) for rect in bar.iter("rect")}
    for kind, us in line.exposed_us.items():
        share = us / line.step_us * WIDE
        # A gap of 0.6 keeps wide blocks apart, and narrow ones stay visible.
        expected = max(share - (0.6 if share > 4 else 0), 0.2) if us else 0
        assert widths.get(COLOURS[kind], 0) == pytest.approx(expected, abs=0.011)
    assert sum(line.exposed_us.values()) == pytest.approx(line.step_us)


def test_picture_has_every_stream_and_number() -> None:
    line, graph = _line()
    markup = render_picture(line, graph, "step")
    texts = {element.text for element in _elements(markup).iter("text")}
    assert {"Iteration", "Host", "PCIe", "Data pipeline", "AI Core", "HCCL"} <= texts
    assert "AI CPU" not in texts
    assert f"{line.step_us / 1e3:.3g} ms" in markup
    assert "loop sink of 100 steps, 8 devices" in markup
    assert line.bound in markup


@pytest.mark.medium
def test_thin_tasks_are_merged_into_few_marks() -> None:
    graph, times = network(3000, 5.0, 1000)
    line = schedule(graph, times, HW, StepOptions(sink_size=1000))
    assert render_picture(line, graph, "step").count("<rect") < 1500


def test_slowest_layers_are_first_with_their_phases() -> None:
    tasks = (
        task(scope="net/a", writes=(0,)),
        task(scope="net/b", reads=(0,), writes=(1,), repeat=3),
        task(scope="transpose(jvp(net))/a/transpose()", phase="backward", reads=(1,), writes=(2,)),
        task("vector", "optimizer", scope="net/c", reads=(2,), writes=(3,)),
    )
    graph = TaskGraph((), tasks)
    line = schedule(
        graph, [timed(10), timed(20), timed(70), timed(5)], HW, StepOptions(mode="graph_sink")
    )
    first, second, third = find_slowest_layers(line, graph)
    assert (first.name, first.tasks) == ("net/a", 2)
    assert first.forward_us == pytest.approx(10)
    assert first.backward_us == pytest.approx(70)
    assert second.us == pytest.approx(60, abs=1)
    assert third == Layer("net/c", 1, update_us=pytest.approx(5))


def _trace(path: Path, graph: TaskGraph, times: Any, **fields: Any) -> dict[str, Any]:
    line = schedule(graph, times, HW, StepOptions(**fields))
    write_trace(line, graph, path / "trace.json")
    return json.loads((path / "trace.json").read_text())  # type: ignore[no-any-return]


def _complete(trace: dict[str, Any]) -> list[Event]:
    return [event for event in trace["traceEvents"] if event["ph"] == "X"]


def _check_format(trace: dict[str, Any]) -> None:
    """The required keys and types of complete and metadata events."""
    named = set()
    for event in trace["traceEvents"]:
        assert event["ph"] in {"X", "M"}
        assert isinstance(event["name"], str)
        assert event["name"]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert isinstance(event["args"], dict)
        if event["ph"] == "M":
            assert event["name"].startswith(("process_", "thread_"))
            named.add((event["name"], event["pid"], event["tid"]))
            continue
        assert event["cat"] in CATEGORIES
        for key in ("ts", "dur"):
            assert isinstance(event[key], int | float)
            assert event[key] >= 0
        assert ("process_name", event["pid"], 0) in named
        assert ("thread_name", event["pid"], event["tid"]) in named
    assert trace["displayTimeUnit"] in {"ms", "ns"}


def _check_streams(trace: dict[str, Any]) -> None:
    events = sorted(_complete(trace), key=lambda event: (event["pid"], event["tid"], event["ts"]))
    for first, second in pairwise(events):
        if (first["pid"], first["tid"]) == (second["pid"], second["tid"]):
            assert first["ts"] + first["dur"] <= second["ts"] + 2e-3, (first, second)


@pytest.mark.slow
@given(graphs(), options())
@settings(max_examples=60, deadline=None)
def test_traces_follow_the_trace_event_format(
    tmp_path_factory: pytest.TempPathFactory,
    case: tuple[TaskGraph, tuple[TaskTime, ...]],
    chosen: StepOptions,
) -> None:
    path = tmp_path_factory.mktemp("trace")
    fields = {name: getattr(chosen, name) for name in StepOptions.__slots__}
    for mode in MODES:
        trace = _trace(path, *case, **{**fields, "mode": mode})
        _check_format(trace)
        _check_streams(trace)


def test_sink_is_launched_once_and_graph_at_every_step(tmp_path: Path) -> None:
    graph, times = network(4, 100.0, 1_000_000)

    def launches(**fields: Any) -> int:
        trace = _trace(tmp_path, graph, times, devices=8, **fields)
        return sum(event["name"] == "Callbacks and launch" for event in _complete(trace))

    assert launches(sink_size=100) == 1
    assert launches(sink_size=2) == 2
    assert launches(mode="graph_sink") == 3


def test_steps_are_consecutive_after_the_launch(tmp_path: Path) -> None:
    graph, times = chain(100.0, 50.0)
    trace = _trace(tmp_path, graph, times, sink_size=100)
    launch = next(event for event in _complete(trace) if event["name"] == "Callbacks and launch")
    assert (launch["ts"], launch["dur"]) == (0, 1742)
    cores = [event for event in _complete(trace) if event["cat"] == "AI_CORE"]
    assert len(cores) == 6
    assert cores[0]["ts"] == pytest.approx(1742 + 259 + 0.11)
    assert cores[2]["ts"] - cores[0]["ts"] == pytest.approx(259 + 150.22, abs=2e-3)


def test_iteration_events_have_vendor_names(tmp_path: Path) -> None:
    graph, times = network(4, 100.0, 1_000_000)
    trace = _trace(tmp_path, graph, times, devices=8, sink_size=10)
    parts = [event for event in _complete(trace) if event["cat"] == "ITERATION"]
    assert [event["name"] for event in parts] == ["Interval", "FP_BP", "Tail"] * 3
    assert [event["args"]["iteration"] for event in parts] == [1, 1, 1, 2, 2, 2, 3, 3, 3]


def test_events_have_name_and_place_of_a_task(tmp_path: Path) -> None:
    graph, _ = chain(1.0, scope="net/conv1", repeat=3, fused=("relu",))
    trace = _trace(tmp_path, graph, [timed(1.0, "memory")])
    event = next(event for event in _complete(trace) if event["cat"] == "AI_CORE")
    assert event["args"] == {
        "kind": "cube",
        "phase": "forward",
        "type": "MatMul",
        "scope": "net/conv1",
        "repeat": 3,
        "bound": "memory",
        "fused": ["relu"],
    }
    assert trace["otherData"]["what"] == "modelled, not measured"


def test_same_timeline_makes_the_same_trace(tmp_path: Path) -> None:
    graph, times = network(4, 100.0, 1_000_000)
    assert _trace(tmp_path, graph, times) == _trace(tmp_path, graph, times)
