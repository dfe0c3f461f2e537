"""Pages: well-formed, self-contained, and true to the timeline that they show."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.ascend.chip.options import MODES, Mode, StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.report.html_timeline import COLOURS, WIDTH, picture, write_picture
from pipeline.backends.ascend.report.time_by_layer import Layer, dearest_layers
from pipeline.backends.ascend.simulate.launch_modes import schedule
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.files.svg_page import ticks
from pipeline.sweep.amortization import write_amortisation
from tests.backends.ascend.made_up import HW, network, task, timed


def _line(mode: Mode = "loop_sink") -> tuple[Timeline, TaskGraph]:
    graph, times = network(6, 500.0, 4_000_000)
    chosen = StepOptions(
        mode=mode, sink_size=100, devices=8, batch_bytes=10_000_000, host_images_per_s=5000.0
    )
    return schedule(graph, times, HW, chosen), graph


def _elements(markup: str) -> ElementTree.Element:
    """The page as XML: what HTML leaves open is closed first."""
    closed = re.sub(r"<(meta[^>]*)>", r"<\1/>", markup.removeprefix("<!doctype html>\n"))
    return ElementTree.fromstring(closed)


@pytest.mark.parametrize("mode", MODES)
def test_a_page_is_well_formed_and_needs_nothing_else(tmp_path: Path, mode: Mode) -> None:
    line, graph = _line(mode)
    write_picture(line, graph, tmp_path / "step.html", title="A <net> & more")
    markup = (tmp_path / "step.html").read_text()
    assert _elements(markup).findtext("head/title") == "A <net> & more"
    for foreign in ("http:", "https:", "<script", "<link", "@import", "url(", " src="):
        assert foreign not in markup


def test_shares_are_as_long_as_what_they_stand_for() -> None:
    line, graph = _line()
    bar = next(
        svg
        for svg in _elements(picture(line, graph, "step")).iter("svg")
        if svg.get("aria-label") == "Shares of the step"
    )
    widths = {rect.get("fill"): float(rect.get("width", "nan")) for rect in bar.iter("rect")}
    assert sum(widths.values()) == pytest.approx(WIDTH, abs=0.1)
    for kind, us in line.exposed_us.items():
        assert widths.get(COLOURS[kind], 0) == pytest.approx(us / line.step_us * WIDTH, abs=0.01)


def test_every_stream_has_its_lane_and_every_number_its_place() -> None:
    line, graph = _line()
    markup = picture(line, graph, "step")
    texts = {element.text for element in _elements(markup).iter("text")}
    assert {"Iteration", "Host", "PCIe", "Data pipeline", "AI Core", "HCCL"} <= texts
    assert "AI CPU" not in texts
    assert f"{line.step_us / 1e3:.3g} ms" in markup
    assert "loop sink of 100 steps, 8 devices" in markup
    assert line.bound in markup


def test_thousands_of_thin_tasks_make_no_thousands_of_marks() -> None:
    graph, times = network(3000, 5.0, 1000)
    line = schedule(graph, times, HW, StepOptions(sink_size=1000))
    assert picture(line, graph, "step").count("<rect") < 1500


def test_the_dearest_layers_come_first_with_their_phases() -> None:
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
    first, second, third = dearest_layers(line, graph)
    assert (first.name, first.tasks) == ("net/a", 2)
    assert first.forward_us == pytest.approx(10)
    assert first.backward_us == pytest.approx(70)
    assert second.us == pytest.approx(60, abs=1)
    assert third == Layer("net/c", 1, update_us=pytest.approx(5))
    assert [one.name for one in dearest_layers(line, graph, 1)] == ["net/a"]


def test_a_curve_has_its_points_where_they_belong(tmp_path: Path) -> None:
    path = tmp_path / "curve.html"
    write_amortisation([(1000, 20.0), (1, 40.0), (10, 22.0)], path, title="Sinks & steps")
    root = _elements(path.read_text())
    dots = [
        (float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in root.iter("circle")
    ]
    (left, top), (middle, _), (right, bottom) = dots
    assert middle - left == pytest.approx((right - left) / 3, abs=0.02)
    assert top < bottom
    assert "2.00 times as fast" in path.read_text()


def test_one_point_is_a_curve_as_well(tmp_path: Path) -> None:
    write_amortisation([(1, 3.0)], tmp_path / "curve.html")
    assert (tmp_path / "curve.html").read_text().count("<circle") == 1


@pytest.mark.parametrize(
    ("points", "words"),
    [([], "no sink size"), ([(0, 1.0)], "sink of 0 steps"), ([(1, float("nan"))], "at nan ms")],
)
def test_a_curve_of_nonsense_is_an_error(
    tmp_path: Path, points: list[tuple[int, float]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_amortisation(points, tmp_path / "curve.html")


@given(st.floats(1e-3, 1e9))
def test_ticks_are_few_even_and_within_the_axis(end: float) -> None:
    marks = ticks(end)
    assert 3 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= end * (1 + 1e-6)
    assert marks[1] * (len(marks) - 1) == pytest.approx(marks[-1])
