"""The curve of steps against sink sizes: points in place, an error for nonsense."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

from pipeline.study.sweep.table import write_amortisation


def _elements(markup: str) -> ElementTree.Element:
    """Parse a page as XML; elements that HTML leaves open are closed first."""
    closed = re.sub(r"<(meta[^>]*)>", r"<\1/>", markup.removeprefix("<!doctype html>\n"))
    return ElementTree.fromstring(closed)


def test_curve_points_are_placed_correctly(tmp_path: Path) -> None:
    path = tmp_path / "curve.html"
    write_amortisation([(1, 40.0), (10, 22.0), (1000, 20.0)], path, title="Sinks & steps")
    root = _elements(path.read_text())
    dots = [
        (float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in root.iter("circle")
    ]
    (left, top), (middle, _), (right, bottom) = dots
    assert middle - left == pytest.approx((right - left) / 3, abs=0.02)
    assert top < bottom
    assert "2.00 times as fast" in path.read_text()
