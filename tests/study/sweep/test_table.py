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
    write_amortisation([(1000, 20.0), (1, 40.0), (10, 22.0)], path, title="Sinks & steps")
    root = _elements(path.read_text())
    dots = [
        (float(dot.get("cx", "nan")), float(dot.get("cy", "nan"))) for dot in root.iter("circle")
    ]
    (left, top), (middle, _), (right, bottom) = dots
    assert middle - left == pytest.approx((right - left) / 3, abs=0.02)
    assert top < bottom
    assert "2.00 times as fast" in path.read_text()


def test_curve_with_one_point(tmp_path: Path) -> None:
    write_amortisation([(1, 3.0)], tmp_path / "curve.html")
    assert (tmp_path / "curve.html").read_text().count("<circle") == 1


@pytest.mark.parametrize(
    ("points", "words"),
    [([], "must have a sink"), ([(0, 1.0)], "sink of 0 steps"), ([(1, float("nan"))], "at nan ms")],
)
def test_invalid_curve_points_are_an_error(
    tmp_path: Path, points: list[tuple[int, float]], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        write_amortisation(points, tmp_path / "curve.html")
