"""Drawings are XML that any parser reads, whatever names they show."""

from __future__ import annotations

from xml.etree.ElementTree import fromstring

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.pages.drawing import MARGIN, Drawing, stack_drawings

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.medium
@given(words=st.text(), tip=st.text(), label=st.text())
def test_any_text_is_escaped(words: str, tip: str, label: str) -> None:
    drawing = Drawing(10, 10, label)
    drawing.add("text", "name", words, tip, x=1)
    (element,) = fromstring(drawing.to_element())[0:1]
    text = element if element.tag == "text" else element[0]
    assert text.get("class") == "name"
    assert len(text.text or "") <= len(words)
    assert fromstring(drawing.to_file_text()).tag == f"{SVG}svg"


def test_numbers_have_six_digits() -> None:
    drawing = Drawing(10, 10, "a")
    drawing.add("circle", r=1 / 3, cx=1_234_567.0)
    assert 'r="0.333333"' in drawing.to_element()
    assert 'cx="1.23457e+06"' in drawing.to_element()


def test_drawing_file_has_margin_and_dark_style() -> None:
    drawing = Drawing(100, 50, "a")
    drawing.add("circle", r=1)
    text = drawing.to_file_text()
    box = fromstring(text).get("viewBox")
    assert box == f"{-MARGIN:g} {-MARGIN:g} {100 + 2 * MARGIN:g} {50 + 2 * MARGIN:g}"
    assert "prefers-color-scheme: dark" in text
    assert "var(--" not in text


def test_stacked_drawings_are_placed_below_each_other() -> None:
    stack = stack_drawings([Drawing(10, 20, "a"), Drawing(30, 40, "b")], "both", gap=5)
    assert (stack.width, stack.height) == (30, 65)
    assert "translate(0,25)" in stack.to_element()
