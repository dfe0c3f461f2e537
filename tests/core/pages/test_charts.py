"""Charts: ticks, lanes, and texts of strangers."""

from __future__ import annotations

from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.pages.charts import (
    LABELS,
    WIDE,
    Curve,
    Lane,
    LaneBar,
    draw_curves,
    draw_histogram,
    draw_lanes,
    draw_scatter,
    round_values,
    stack_blocks,
)
from pipeline.core.pages.page import Drawing, stack_drawings

HOSTILE = "</svg></style><script>alert(1)</script>\"'&\x00\ud800"


@given(st.floats(1e-3, 1e9))
def test_ticks_are_few_even_and_within_the_axis(end: float) -> None:
    marks = round_values(0, end, 8)
    assert 3 <= len(marks) <= 9
    assert marks[0] == 0
    assert marks[-1] <= end * (1 + 1e-6)
    assert marks[1] * (len(marks) - 1) == pytest.approx(marks[-1])


def test_curves_are_drawn_at_their_values() -> None:
    curves = [
        Curve("train", np.arange(1, 4), np.array([1.0, np.nan, 3.0])),
        Curve("eval", np.arange(2, 4), np.array([2.0, 2.0]), marked=True),
    ]
    chart = draw_curves("loss", curves)
    assert chart is not None
    lines = [
        [tuple(map(float, place.split(","))) for place in line.get("points", "").split()]
        for line in chart.marks.iter("polyline")
    ]
    # The last curve is drawn first, below the others.
    (even, _), (low, high) = lines
    assert even[1] == pytest.approx((low[1] + high[1]) / 2, abs=0.11)
    assert even[0] == pytest.approx((low[0] + high[0]) / 2, abs=0.11)
    assert high[1] < low[1]
    assert len(list(chart.marks.iter("circle"))) == 4


def test_long_curve_is_grouped_with_value_range() -> None:
    values = np.tile([0.0, 1.0], 5000)
    chart = draw_curves("loss", [Curve("train", np.arange(10_000), values)])
    assert chart is not None
    (line,) = chart.marks.iter("polyline")
    (area,) = chart.marks.iter("polygon")
    assert len(line.get("points", "").split()) == 240
    assert len(area.get("points", "").split()) == 480


@pytest.mark.parametrize("values", [[], [np.nan], [1.0]])
def test_curve_chart_needs_two_steps(values: list[float]) -> None:
    assert draw_curves("loss", [Curve("train", np.arange(len(values)), np.array(values))]) is None


def test_non_finite_numbers_are_left_out() -> None:
    nothing = np.array([np.nan, np.inf])
    assert draw_histogram("residuals", nothing, "") is None
    assert draw_scatter("price", nothing, nothing) is None
    bars = draw_histogram("residuals", np.array([0.0, 0.0, 1.0, np.nan]), "")
    assert bars is not None
    heights = [float(bar.get("height", 0)) for bar in bars.marks.iter("rect")]
    assert sorted(heights)[-2] == pytest.approx(max(heights) / 2, rel=1e-3)


def test_lane_blocks_are_drawn_at_their_times() -> None:
    lanes = [
        Lane("one", [LaneBar(1, 2, "blue", "tip", "words")]),
        Lane("two", stack_blocks([("red", 1.0, "a"), ("blue", 0.0, "b"), ("sand", 3.0, "c")])),
    ]
    chart = draw_lanes("lanes", lanes, 4.0, ticks=True)
    blocks = list(chart.marks.iter("rect"))
    assert [block.get("class") for block in blocks] == ["blue", "red", "sand"]
    quarter = (WIDE - LABELS) / 4
    starts = [float(block.get("x", 0)) for block in blocks]
    assert starts == pytest.approx([LABELS + quarter, LABELS, LABELS + quarter], abs=0.01)
    texts = [text.text for text in chart.marks.iter("text")]
    assert {"0", "4", "one", "two", "words"} <= set(texts)


def test_untrusted_names_are_escaped_in_a_file() -> None:
    drawing = Drawing(10, 10, HOSTILE)
    drawing.add("text", "title", HOSTILE, x=1, y=2)
    drawing.add("rect", "blue", tip=HOSTILE, x=1, y=2)
    text = stack_drawings([drawing, draw_lanes(HOSTILE, [Lane(HOSTILE, [])], 1.0)], HOSTILE)
    root = ElementTree.fromstring(text.to_file_text())
    assert "<script" not in text.to_file_text()
    shown = "</svg></style><script>alert(1)</script>\"'&\ufffd\ufffd"
    assert [found.text for found in root.iter("{http://www.w3.org/2000/svg}text")] == [shown, shown]


def test_chart_file_has_dark_style_and_no_variables() -> None:
    text = Drawing(10, 10, "empty").to_file_text()
    assert text.startswith("<svg ")
    assert "prefers-color-scheme: dark" in text
    assert "var(" not in text
