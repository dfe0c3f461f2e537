"""The page of imported networks: made of the committed rows, with the causes that were measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.foreign_page import (
    CAUSES,
    EQUAL_IN_FLOAT64,
    MOVED_IN_FLOAT64,
    NOT_MEASURED,
    ROWS,
    UNKNOWN,
    Comparison,
    format_page,
    read_rows,
    write_row,
)

DIFFERING = Comparison("timm", "vgg", losses=2e-3, torch_losses=2e-3, conditions="a day")


def test_page_has_the_committed_rows() -> None:
    page = ROWS.with_suffix(".md").read_text(encoding="utf-8")
    command = "python -m benchmarks.foreign_page --save"
    assert page == format_page(read_rows(ROWS).values()), f"written by {command}"


@pytest.mark.parametrize(
    ("figures", "cause"),
    [
        ({"losses": 1e-5}, ""),
        ({}, NOT_MEASURED),
        ({"wide_losses": 9e-6}, EQUAL_IN_FLOAT64),
        ({"wide_losses": 4e-5, "moved_losses": 1e-5}, MOVED_IN_FLOAT64),
        ({"wide_losses": 5e-5, "moved_losses": 1e-5}, UNKNOWN),
        ({"family": "hgnet"}, CAUSES["timm/hgnet"]),
        ({"refusal": "an operator | another"}, "an operator / another"),
    ],
)
def test_only_measured_causes_are_named(figures: dict[str, float | str], cause: str) -> None:
    row = replace(DIFFERING, **figures)  # type: ignore[arg-type]
    assert row.cause == cause
    assert row.make_row()[-1] == cause


def test_counts_are_of_the_rows() -> None:
    rows = [
        replace(DIFFERING, family="b", losses=0.0),
        DIFFERING,
        replace(DIFFERING, family="c", losses=float("nan"), refusal="isn't made"),
    ]
    page = format_page(rows)
    assert (
        "* timm: 1 of 60 families.\n"
        f"  * 1 further, {NOT_MEASURED}: `timm/vgg`.\n"
        "  * 1 not compared, for the reason in the table: `timm/c`.\n"
        "  * 57 not run.\n"
        "* transformers: 0 of 34 families.\n"
    ) in page
    assert "* a day: `timm/b`, `timm/c`, `timm/vgg`.\n" in page


def test_written_row_replaces_the_former_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    assert read_rows(path) == {}
    other = replace(DIFFERING, family="beit", shape=(3, 64, 64), losses=0.0)
    for row in (DIFFERING, other, replace(DIFFERING, wide_losses=1e-15)):
        write_row(path, row)
    rows = read_rows(path)
    assert rows.keys() == {"timm/beit", "timm/vgg"}
    assert rows["timm/vgg"].cause == EQUAL_IN_FLOAT64
    assert rows["timm/beit"].make_row()[2] == "3x64x64"
