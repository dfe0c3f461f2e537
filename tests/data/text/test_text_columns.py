"""Columns of texts in CSV files and lines of JSON, and what is refused."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.text import text_columns
from pipeline.data.text.text_columns import _number_lines, make_locate, read_text_columns
from pipeline.data.text.text_format import read_text
from tests.data.text.test_text_format import write


def test_rows_have_both_columns(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", '\ufefflabel,id,text\nyes,1,"a, b"\nno,2,"c\nd"\n')
    assert read_text_columns(file, ("text", "label")) == [("a, b", "yes"), ("c\nd", "no")]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"has no column '?text'?, '?label'?; it has nothing"),
        ("text,name\na,b\n", "has no column '?label'?; it has"),
        ("text,label\n", "has no rows"),
        ("text,label\na\n", "line 2 doesn't have 2 fields"),
        ("text,label\na,b,c\n", "line 2 doesn't have 2 fields"),
        ('text,label\n"a,b\n', "unexpected end of data"),
        ("text,label\na\0,b\n", "isn't a CSV: it holds zero bytes"),
        (b"text,label\n\xff,b\n", r"a\.csv: "),
    ],
)
def test_file_without_the_rows_is_refused(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_text_columns(write(tmp_path / "a.csv", text), ("text", "label"))


def test_places_of_rows_are_lines_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "texts.csv"
    file.write_text('text,class\none,a\n"two\nlines",b\n\nfour,a\nfive,b\n')
    locate = make_locate(file, np.array([3, 0, 2]))
    assert [locate(sample) for sample in range(3)] == [f"{file}, line {n}" for n in (7, 2, 6)]
    assert file.read_text().splitlines()[6] == "five,b"
    file.write_text(f"text,class\n{'x' * 200_000},a\ntwo,b\n")
    assert make_locate(file, np.array([1]))(0) == f"{file}, line 3"


def test_objects_on_lines_have_both_columns(tmp_path: Path) -> None:
    content = '\ufeff{"label": "yes", "id": 1, "text": "a, b"}\n\n{"text": "c\\nd", "label": "no"}'
    file = write(tmp_path / "a.jsonl", content)
    assert read_text_columns(file, ("text", "label")) == [("a, b", "yes"), ("c\nd", "no")]
    assert make_locate(file, np.array([1]))(0) == f"{file}, line 3"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "a.jsonl: has no rows"),
        ('{"text": "a"}\n', "line 1 has no label; it has text"),
        ('{"text": "a", "label": "b"}\n["a", "b"]\n', "line 2 isn't an object; must have text, la"),
        ('{"text": "a", "label": 3}\n', "line 1: label is int; must be a text"),
        ('{"text": "a", "label": "b"\n', "line 1 isn't JSON: Expecting"),
        ("[" * 100_000, "line 1 can't be read: "),
        ('{"text": "\\udc00", "label": "b"}\n', r"line 1: text has \\udc00, half of a character"),
    ],
)
def test_lines_of_another_form_are_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read_text_columns(write(tmp_path / "a.jsonl", text), ("text", "label"))


def test_field_of_more_than_a_mebibyte_is_read(tmp_path: Path) -> None:
    text = "x" * (2**20 + 1)
    file = write(tmp_path / "a.csv", f"text,label\n{text},a\n")
    assert read_text_columns(file, ("text", "label")) == [(text, "a")]
    assert make_locate(file, np.array([0]))(0) == f"{file}, line 2"


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_file_has_another_encoding(tmp_path: Path, suffix: str) -> None:
    lines = {"csv": "text\né\n", "jsonl": '{"text": "é"}\n'}
    file = tmp_path / f"a.{suffix}"
    file.write_bytes(lines[suffix].encode("utf-16"))
    assert read_text_columns(file, ("text",), "utf-16") == [("é",)]
    assert "line" in make_locate(file, np.array([0]), "utf-16")(0)
    with pytest.raises(DataError, match=r"is not UTF-8: byte 0xff at 0; set dataset\.encoding"):
        read_text_columns(file, ("text",))


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_compressed_file_is_read(tmp_path: Path, suffix: str) -> None:
    lines = {"csv": "text\né\n", "jsonl": '{"text": "é"}\n'}
    file = tmp_path / f"a.{suffix}.gz"
    file.write_bytes(gzip.compress(lines[suffix].encode("utf-16")))
    assert read_text_columns(file, ("text",), "utf-16") == [("é",)]
    line = {"csv": 2, "jsonl": 1}[suffix]
    assert make_locate(file, np.array([0]), "utf-16")(0) == f"{file}, line {line}"
    file.write_bytes(file.read_bytes()[:-9])
    with pytest.raises(DataError, match=rf"a\.{suffix}\.gz: can't be unpacked"):
        read_text_columns(file, ("text",), "utf-16")


def test_suspended_reader_leaves_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    lines = _number_lines(tmp_path / "a.csv", f"text\n{'x' * 200_000}\ntwo\n")
    assert next(lines) == 2
    assert csv.field_size_limit() == limit
    assert list(lines) == [3]


@pytest.mark.parametrize("suffix", ["csv", "jsonl"])
def test_places_of_many_samples_read_a_file_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """Rows of several lines are named by their last one; empty lines are counted."""
    texts = {"csv": 'text\na\n"b\nc"\n\nd\n', "jsonl": '{"text": "a"}\n\n\n{"text": "b"}\n'}
    lines = {"csv": [2, 4, 6], "jsonl": [1, 4]}[suffix]
    file = write(tmp_path / f"a.{suffix}", texts[suffix])
    readings = []

    def read_and_count(path: Path, encoding: str = "utf-8") -> str:
        readings.append(path)
        return read_text(path, encoding)

    monkeypatch.setattr(text_columns, "read_text", read_and_count)
    locate = make_locate(file, np.arange(len(lines))[::-1])
    assert readings == []
    places = [locate(sample) for sample in range(len(lines))]
    assert places == [f"{file}, line {line}" for line in reversed(lines)]
    assert readings == [file]
