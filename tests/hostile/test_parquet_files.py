"""Parquet files of strangers: small ones that unpack to gigabytes, damaged ones, wide ones."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.tables import table_files as reader
from pipeline.data.tables.raw_table import RawTable, Texts
from tests.slow_cases import mark_slow_except

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def write(path: Path, columns: Any, **options: Any) -> Path:
    file = path / "a.parquet"
    pq.write_table(pa.table(columns), file, compression="zstd", **options)
    return file


def read(file: Path, kind: Any = "auto") -> RawTable:
    return reader.read_parquet(file, lambda name: kind)


def refusal(file: Path) -> str:
    before_s = time.process_time()
    with pytest.raises(ValueError) as caught:  # noqa: PT011  # the message is returned
        read(file)
    assert time.process_time() - before_s < 5
    message = str(caught.value)
    assert message.isprintable()
    return message


def texts_of(table: RawTable, name: str) -> list[str | None]:
    column = table.columns[name]
    assert isinstance(column, Texts)
    return [column.texts[code] if code >= 0 else None for code in column.codes]


@pytest.mark.slow
def test_repeated_text_is_stored_once(tmp_path: Path) -> None:
    """3 GB of texts, beyond the limit of 1.1 GB, of which a dictionary needs 10 kB."""
    rows = 300_000
    column = pa.DictionaryArray.from_arrays(np.zeros(rows, np.int32), ["a" * 10_000])
    file = write(tmp_path, {"x": column, "y": np.arange(rows) % 2}, store_schema=False)
    table = read(file)
    assert isinstance(table.columns["x"], Texts)
    assert table.columns["x"].texts == ("a" * 10_000,)
    assert not table.columns["x"].codes.any()


@pytest.mark.slow
def test_text_that_unpacks_to_gigabytes_is_refused(tmp_path: Path) -> None:
    text = pa.array(["a" * 400_000_000])
    options = {"use_dictionary": False, "write_statistics": False}
    message = refusal(write(tmp_path, {"x": text, "y": [1]}, **options))
    assert "takes more than 1.1 GB of memory to read 2 columns of 1 rows from a file of" in message


@pytest.mark.slow
def test_shared_prefixes_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    texts = [("a" * 200_000) + str(n) for n in range(2_000)]
    encoding = {"x": "DELTA_BYTE_ARRAY", "y": "PLAIN"}
    options = {"use_dictionary": False, "column_encoding": encoding}
    message = refusal(write(tmp_path, {"x": texts, "y": range(2_000)}, **options))
    assert "takes more than 1.1 GB of memory" in message


@pytest.mark.medium
@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY", "PLAIN"])
def test_text_encodings_are_read(encoding: str, tmp_path: Path) -> None:
    texts = [None, "bb", "a", "bb", None, "c\u00e9"]
    file = write(tmp_path, {"x": texts}, use_dictionary=False, column_encoding={"x": encoding})
    assert texts_of(read(file), "x") == texts


def test_too_many_rows_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_BASE_VALUES", 1_000)
    monkeypatch.setattr(reader, "_VALUES_PER_BYTE", 10)
    file = write(tmp_path, {"y": pa.nulls(1_000_000, pa.float32())})
    size_bytes = file.stat().st_size
    assert refusal(file) == (
        f"claims 1,000,000 rows of 1 columns in {size_bytes:,} bytes; must have at most "
        f"{1_000 + 10 * size_bytes:,} values"
    )


def test_too_many_columns_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "MAX_COLUMNS", 10)
    file = write(tmp_path, {f"c{n}": [1] for n in range(11)})
    assert refusal(file) == "has 11 columns; must have at most 10"


def test_error_of_a_damaged_file_has_the_reason(tmp_path: Path) -> None:
    file = write(tmp_path, {"x": np.arange(100.0), "y": np.arange(100)})
    content = bytearray(file.read_bytes())
    content[4:40] = b"\xff" * 36
    file.write_bytes(content)
    assert refusal(file).startswith("can't be read as Parquet: Couldn't deserialize thrift")


@pytest.mark.medium
def test_dictionaries_become_texts_in_row_order(tmp_path: Path) -> None:
    """Dictionaries of row groups differ, and have texts that no row has."""
    column = pa.DictionaryArray.from_arrays([2, None, 1, 2], ["unused", "b", "a"])
    plain = ["z", "y", "z", None]
    columns = {"x": column, "w": plain, "n": pa.array([3, 1, 3, None])}
    file = write(tmp_path, columns, row_group_size=2)
    table = read(file)
    assert texts_of(table, "x") == ["a", None, "b", "a"]
    assert table.columns["x"].texts == ("a", "b")
    assert table.columns["w"].texts == ("z", "y")
    assert isinstance(table.columns["n"], np.ndarray)
    np.testing.assert_array_equal(table.columns["n"], [3, 1, 3, np.nan])
    assert texts_of(read(file, "category"), "n") == ["3", "1", "3", None]


@pytest.mark.slow
def test_columns_are_read_in_portions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader, "_COLUMNS_AT_ONCE", 2)
    columns = {"a": [1.5, 2], "b": ["x", "y"], "c": [True, False], "d": [7, 8], "e": ["", "z"]}
    table = read(write(tmp_path, columns))
    assert list(table.columns) == list(table.names) == list(columns)
    assert texts_of(table, "c") == ["true", "false"]
    assert texts_of(table, "e") == [None, "z"]  # as in CSV, an empty text is missing


@pytest.mark.medium
@pytest.mark.parametrize("of", mark_slow_except(["string"], ["float64", "string", "dictionary"]))
def test_table_without_rows_has_its_columns(of: str, tmp_path: Path) -> None:
    kind = pa.dictionary(pa.int32(), pa.string()) if of == "dictionary" else of
    table = read(write(tmp_path, {"x": pa.array([], kind), "y": pa.array([], "int64")}))
    assert (table.rows, table.names) == (0, ("x", "y"))


@pytest.mark.medium
def test_column_of_only_missing_texts_is_read(tmp_path: Path) -> None:
    missing = pa.array([None, None], "string")
    columns = {"x": missing, "d": missing.dictionary_encode(), "n": pa.nulls(2)}
    table = read(write(tmp_path, columns))
    assert [texts_of(table, name) for name in table.names] == [[None, None]] * 3
