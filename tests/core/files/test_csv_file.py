"""CSV text is read back by Python's own reader, and a refusing disk is one message."""

from __future__ import annotations

import csv
import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import RunError
from pipeline.core.files.csv_file import format_csv, write_csv

texts = st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=8)


@pytest.mark.medium
@given(pairs=st.lists(st.tuples(texts, texts), min_size=1))
def test_rows_round_trip(pairs: list[tuple[str, str]]) -> None:
    rows = [{"name": name, "value, unit": value} for name, value in pairs]
    text = format_csv(rows)
    assert list(csv.DictReader(io.StringIO(text, newline=""))) == rows


def test_text_without_rows_is_empty() -> None:
    assert format_csv([]) == ""


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing/rows\.csv: can't be written: No such file"):
        write_csv(tmp_path / "missing" / "rows.csv", [{"a": 1}])


def test_written_file_has_the_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", [{"a": 1, "b": 2.5}, {"a": None, "b": "x"}])
    assert (tmp_path / "rows.csv").read_text() == "a,b\n1,2.5\n,x\n"
