"""Recorded figures: each processor has its own, and a damaged file is one message."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.study.expect.outcomes import (
    BitsOrigin,
    find_file,
    read_origin,
    read_records,
    write_record,
)

HERE = BitsOrigin("AMD EPYC, avx512 x2", "cpu:0 cpu", "jax 0.10", "")
THERE = replace(HERE, processor="Neoverse, neon x4", settings="XLA_FLAGS=a")


def test_records_of_other_processors_stay(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.yaml"
    assert read_records(recipe) == []
    write_record(recipe, HERE, {"loss@5": 0.1})
    write_record(recipe, THERE, {"loss@5": 0.2})
    write_record(recipe, HERE, {"loss@5": 0.3})
    assert read_records(recipe) == [(THERE, {"loss@5": 0.2}), (HERE, {"loss@5": 0.3})]


def test_difference_of_origins_names_what_differs() -> None:
    assert HERE.describe_difference(HERE) is None
    text = HERE.describe_difference(THERE)
    assert text == "processor Neoverse, neon x4, settings XLA_FLAGS=a"
    assert THERE.describe_difference(HERE) == "processor AMD EPYC, avx512 x2, settings none"


@pytest.mark.parametrize("text", ["{", "[]", '{"records": 3}', '{"records": [{"origin": {}}]}'])
def test_damaged_file_is_one_message(tmp_path: Path, text: str) -> None:
    recipe = tmp_path / "mine.yaml"
    find_file(recipe).parent.mkdir()
    find_file(recipe).write_text(text)
    with pytest.raises(DataError, match=r"mine\.json"):
        read_records(recipe)


def test_run_without_provenance_has_no_origin(tmp_path: Path) -> None:
    assert read_origin(tmp_path) is None
