"""Rows of community repositories as described rows; no row is priced."""

from __future__ import annotations

import csv
from dataclasses import replace

import pytest

from benchmarks.community import CHIPS, ROWS, describe_row, format_row
from pipeline.backends.ascend.published.scores import load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    configure_row,
    load_published_steps,
)

with ROWS.open(newline="", encoding="utf-8") as lines:
    COLLECTED = {row["id"]: row for row in csv.DictReader(lines)}


@pytest.mark.parametrize("name", COLLECTED)
def test_collected_row_is_the_described_one(name: str) -> None:
    row = COLLECTED[name]
    step = describe_row(row)
    assert step is not None
    assert (step.id, step.batch, step.devices) == (
        name,
        int(row["batch_per_chip"]),
        int(row["chips"]),
    )
    assert (step.precision, step.mode) == (row["precision"], row["mode"])
    assert configure_row(step).stack.is_eager == row["software"].startswith("PyTorch")
    assert row["chip"] in CHIPS
    described = {each.id: each for each in load_published_steps(DESCRIBED)}
    if name in described:
        assert replace(step, framework=described[name].framework) == described[name]


def test_longer_text_has_its_own_tokens() -> None:
    short, long = (describe_row(COLLECTED[name]) for name in ("F048", "F050"))
    assert short is not None
    assert long is not None
    assert (short.pixels, long.pixels) == (256, 512)


def test_sealed_and_undescribed_rows_are_not_priced() -> None:
    sealed = next(row for row in load_classes().values() if row.part == "seal")
    row = {**COLLECTED["F001"], "id": sealed.id}
    assert describe_row(row) is None
    assert format_row(row, None)[1:3] == ["seal", "Stable Diffusion 1.5 vanilla"]
    assert format_row(COLLECTED["F050"], None)[1] == "fit, doubtful"
