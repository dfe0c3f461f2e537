"""Tables of strangers: folders, pipes, bytes that are no text, fields without end."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.errors import DataError
from pipeline.data.sources.tabular import CsvTable
from tests.data.section import section
from tests.hostile.test_data_files import refusal


def table(root: Path, **fields: Any) -> CsvTable:
    return CsvTable(**section(root=root, target="y", **fields))


@pytest.mark.parametrize("kind", ["folder", "pipe", "nothing"])
def test_special_file_path_is_refused(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    expected = "there is no such file" if kind == "nothing" else "isn't a regular file"
    assert refusal(lambda: table(path).read(tmp_path)) == f"{path}: {expected}"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"x,y\n" + b"7" * 17_000_000 + b",1\n", "line 2: has 16,777,216 characters or more"),
        (b"x,y\n" + b'"' + b"a\n" * 200_000, "line 200,001: unexpected end of data"),
        (b"x,y\n1,2\n1,\x002\n", "line 3: has a NUL character"),
        (b"\x00" * 100, "line 1: has a NUL character"),
        (
            b"\x89PNG\r\n\x1a\n" + bytes(100),
            "one of the first lines has the byte 0x89, which isn't",
        ),
        (b"x,y\n1,1e400\n", "line 2: y = inf: must be a number"),
        (b"x,y\n1e308,1\n-1e308,2\n", r"line 2: x = 1e+308: must be a number of at most 3.403e+38"),
        pytest.param(
            b"x," * 120_000 + b"y\n", "has the column x more than once", marks=pytest.mark.slow
        ),
        pytest.param(
            b",".join(b"c%d" % n for n in range(120_000)) + b"\n",
            "has more than 20,000 columns",
            marks=pytest.mark.slow,
        ),
        (b"\x1b[2J,y\nred\x1b[2J,1\n" + b"2,3\n" * 5, r"line 2: \x1b[2J = 'red\x1b[2J', and 83.3%"),
    ],
    ids=["huge", "endless", "nul", "zeros", "png", "1e400", "1e308", "same", "wide", "steering"],
)
def test_hostile_tables_are_refused(content: bytes, expected: str, tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_bytes(content)
    assert expected in refusal(lambda: table(path).read(tmp_path))


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(["utf-8", "latin-1", "utf-16", "utf-32", "ascii"]))
def test_random_bytes_raise_one_printable_error(
    tmp_path_factory: pytest.TempPathFactory, content: bytes, encoding: str
) -> None:
    folder = tmp_path_factory.mktemp("bytes")
    (folder / "a.csv").write_bytes(b"x,y\n1,2\n" + content)
    message = ""
    try:
        table(folder / "a.csv", encoding=encoding).read(folder)
    except DataError as error:
        message = str(error)
    assert message.isprintable()
