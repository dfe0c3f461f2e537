"""CSV text is read back by Python's own reader, and a refusing disk is one message."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path

import numpy as np
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
    back = list(csv.DictReader(io.StringIO(text, newline="")))
    bare = [{key: value.replace("'", "") for key, value in row.items()} for row in back]
    assert bare == [{key: v.replace("'", "") for key, v in row.items()} for row in rows]


@given(text=st.text(st.sampled_from("=+-@;\t\r\n a1'.%"), min_size=1, max_size=6))
def test_no_cell_begins_like_a_formula(text: str) -> None:
    _, (cell,) = csv.reader(io.StringIO(format_csv([{"a": text}]), newline=""))
    for part in re.split("[;\t\r\n]", cell):
        assert not part.strip().startswith(tuple("=@"))
        if part.strip().startswith(tuple("+-")):
            assert re.fullmatch("[-+]*[1.]* ?%?", cell)
    assert cell.replace("'", "") == text.replace("'", "")


@pytest.mark.parametrize(
    ("value", "cell"),
    [
        ("=cmd|' /C calc'!A0", "'=cmd|' /C calc'!A0"),
        ("+1+cmd|x", "'+1+cmd|x"),
        ("-2+3", "'-2+3"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\t=1", "'\t'=1"),
        ("\r1", "'\r1"),
        (" =1", "' =1"),
        ("\uff1d1", "'\uff1d1"),
        ("a;=1", "a;'=1"),
        ("a\t =1", "a\t '=1"),
        (Path("=1"), "'=1"),
        ("-1.5", "-1.5"),
        ("+1e-05", "+1e-05"),
        ("-inf", "-inf"),
        ("-12.5 %", "-12.5 %"),
        ("-", "-"),
        (-1.5, "-1.5"),
        (np.float32(-2), "-2.0"),
        ("a=b", "a=b"),
        ("cat-1", "cat-1"),
        ("'=1", "'=1"),
        (None, ""),
    ],
)
def test_formulas_are_neutralised_and_numbers_stay(value: object, cell: str) -> None:
    ((read,), (name,)) = csv.reader(io.StringIO(format_csv([{value: value}]), newline=""))  # type: ignore[dict-item]
    assert read == name == cell


def test_text_without_rows_is_empty() -> None:
    assert format_csv([]) == ""


def test_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"missing/rows\.csv: can't be written: No such file"):
        write_csv(tmp_path / "missing" / "rows.csv", [{"a": 1}])


def test_written_file_has_the_text(tmp_path: Path) -> None:
    write_csv(tmp_path / "rows.csv", [{"a": 1, "b": 2.5}, {"a": None, "b": "x"}])
    assert (tmp_path / "rows.csv").read_text() == "a,b\n1,2.5\n,x\n"
