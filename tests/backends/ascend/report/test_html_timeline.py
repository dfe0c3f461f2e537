"""Pages: well-formed, self-contained, and true to the timeline that they show."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from pipeline.backends.ascend.chip.options import MODES, Mode, StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.report.html_timeline import COLOURS, render_picture
from pipeline.backends.ascend.report.priced_step import Layer, find_slowest_layers
from pipeline.backends.ascend.simulate.launch_modes import schedule
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.core.pages.charts import WIDE
from tests.backends.ascend.made_up import HW, network, task, timed


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
