from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.sources.tabular import CsvTable
from pipeline.data.table import TableFormat
from pipeline.data.tables import fit_table
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import RawTable
from tests.data.section import section
from tests.data.tables.test_table_files import values

LINES = """{"size": 1, "kind": "a, b", "new": true, "price": 2.5}

{"kind": null, "size": "2", "price": -1e3, "day": "2024-01-31"}
"""


def read(folder: Path, text: str | bytes, **form: str) -> RawTable:
    file = folder / "a.jsonl"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_table(file, TableFormat(**{"missing_values": (), **form}), lambda name: "auto")


def test_objects_are_rows(tmp_path: Path) -> None:
    table = read(tmp_path, LINES)
    assert table.names == ("size", "kind", "new", "price", "day")
    assert {name: values(table, name) for name in table.names} == {
        "size": [1, 2],
        "kind": ["a, b", None],
        "new": ["true", None],
        "price": [2.5, -1000],
        "day": [None, "2024-01-31"],
    }
    assert table.locate(1) == "line 3"


def test_numbers_have_points_whatever_the_decimal_mark(tmp_path: Path) -> None:
    assert values(read(tmp_path, LINES, decimal=","), "price") == [2.5, -1000]
    small = '{"x": 1.5e-07}\n{"x": -0.25}\n'
    assert values(read(tmp_path, small, decimal=","), "x") == [1.5e-07, -0.25]


def test_texts_of_numbers_have_the_decimal_mark(tmp_path: Path) -> None:
    """As a CSV has them: a point separates thousands."""
    lines = '{"x": "1.234,5", "y": "2,5"}\n{"x": 7, "y": 0.5}\n'
    table = read(tmp_path, lines, decimal=",")
    assert (values(table, "x"), values(table, "y")) == ([1234.5, 7], [2.5, 0.5])


def test_room_is_looked_for_while_a_compressed_file_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    monkeypatch.setattr(fit_table, "_BLOCK_CHARS", 1000)
    monkeypatch.setattr(fit_table, "require_room", lambda size, purpose: asked.append(size))
    read(tmp_path, gzip.compress(b'{"x": "aaaaaaaaaa"}\n' * 500))
    assert len(asked) > 4


def test_file_has_another_encoding(tmp_path: Path) -> None:
    table = read(tmp_path, '{"a": "é"}\n'.encode("utf-16"), encoding="utf-16")
    assert values(table, "a") == ["é"]


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.JSON", "a.ndjson.gz"])
def test_suffix_before_the_compression_names_the_content(tmp_path: Path, name: str) -> None:
    content = b'{"a": 1, "b": "x"}\n{"a": 2}\n'
    file = tmp_path / name
    file.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    table = read_table(file, TableFormat(missing_values=()), lambda name: "auto")
    assert (table.names, values(table, "a")) == (("a", "b"), [1, 2])


def test_table_of_objects_has_the_columns_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n" + "".join(f"{n},{n / 4}\n" for n in range(9)))
    lines = "".join(f'{{"a": {n}, "b": {n / 4}}}\n' for n in range(9))
    (tmp_path / "a.jsonl").write_text(lines)
    data = [
        CsvTable(**section(root=tmp_path / name, target="b")).read(tmp_path / "cache")
        for name in ("a.csv", "a.jsonl")
    ]
    for name in ("features", "label"):
        columns = [np.asarray(one.train.columns[name]) for one in data]
        np.testing.assert_array_equal(columns[0], columns[1])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n", "has no rows"),
        ('{"a": 1}\n[1]\n', "line 2 isn't an object of named values"),
        ('{"a": 1}\n{"a": 1\n', "line 2 isn't JSON: "),
        ('{"a": [1]}\n', "line 1: a is a list; must be a number, a text, true, false or null"),
        ('{"a": {}}\n', "line 1: a is an object; must be"),
        ('{"a": 1}\n{"a": 1e999}\n', "line 2: a = inf: must be a number of at most"),
        (b'{"a": "\xe9"}\n', "has the byte 0xe9, which isn't utf-8; set dataset.encoding"),
        ('{"a": 1}\n\0\n', "line 2: has a NUL character"),
        ('{"a": "b"}\n{"a": "\\ud83d"}\n', r"a.jsonl: line 2: a has \\ud83d, half of a character"),
        ('{"a": 1}\n{"\\ud83d": 1}\n', r"line 2: a name has \\ud83d, half of a character"),
    ],
)
def test_damaged_file_is_named(tmp_path: Path, text: str | bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(tmp_path, text)
