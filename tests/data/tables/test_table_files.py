from __future__ import annotations

import csv
import gzip
import io
import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.core.files import unpacked_file
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables import table_files as module
from pipeline.data.tables.raw_table import RawTable, Texts
from pipeline.data.tables.table_files import read_csv

MISSING = ("", "NA")


def read(
    path: Path, content: str | bytes, kinds: dict[str, Kind] | None = None, **form: Any
) -> Any:
    raw = content.encode() if isinstance(content, str) else content
    path.joinpath("a.csv").write_bytes(raw)
    kinds = kinds or {}
    written = TableFormat(**{"missing_values": MISSING, **form})
    return read_csv(path / "a.csv", written, lambda name: kinds.get(name, "auto"))


def values(table: RawTable, name: str) -> list[Any]:
    column = table.get_column(name)
    if isinstance(column, np.ndarray):
        return [None if math.isnan(value) else value for value in column.tolist()]
    return [None if code < 0 else column.texts[code] for code in column.codes.tolist()]


def test_columns_are_numbers_or_texts(tmp_path: Path) -> None:
    table = read(tmp_path, "a,b,c\n1,red,\n-2.5e3, blue ,7\n NA,red,8\n")
    assert table.rows == 3
    assert values(table, "a") == [1, -2500, None]
    assert values(table, "b") == ["red", "blue", "red"]
    assert values(table, "c") == [None, 7, 8]
    assert [type(column) for column in table.columns.values()] == [np.ndarray, Texts, np.ndarray]


def test_rows_are_read_once_for_their_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = read(tmp_path, 'a,b\n1,x\n2,"y\nz"\n\n3,x\n')
    openings = []
    original = module._open_rows

    def open_and_count(*words: Any) -> Any:
        openings.append(words)
        return original(*words)

    monkeypatch.setattr(module, "_open_rows", open_and_count)
    places = [table.locate(row) for row in (2, 0, 1, 2)]
    assert places == ["line 6", "line 2", "line 4", "line 6"]
    assert len(openings) == 1


def test_suspended_reader_leaves_the_limit_of_the_csv_module(tmp_path: Path) -> None:
    limit = csv.field_size_limit()
    table = read(tmp_path, f"a,b\n1,{'x' * 200_000}\n2,y\n")
    assert table.locate(0) == "line 2"
    assert csv.field_size_limit() == limit
    assert table.locate(1) == "line 3"


def test_type_can_be_set(tmp_path: Path) -> None:
    table = read(tmp_path, "year,id\n1999,1\n2001,2\n", {"year": "category", "id": "ignore"})
    assert list(table.columns) == ["year"]
    assert values(table, "year") == ["1999", "2001"]


def test_column_with_late_text_is_reread_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "CHUNK", 2)
    table = read(tmp_path, "a,b\n1,1\n2,2\n3,3\n4,x\n5,5\n")
    assert values(table, "a") == [1, 2, 3, 4, 5]
    assert values(table, "b") == ["1", "2", "3", "x", "5"]
    assert table.locate(3) == "line 5"


SOUND = [
    "a,b\n1,x\n2,y\n",
    '"a","b, c"\r\n1,"say ""hi"", twice"\r\n\r\n2,"two\nlines"\r\n',
    "\n\ra,b\n NA,1e5\n nan,+.5\n",
    "\ufeffa;b\n1,5;\u00fc\n",
    "a,b\n",
]


@pytest.mark.parametrize("text", SOUND)
def test_pyarrow_and_strict_reader_agree_on_valid_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    tables = []
    for splitter in ("_split_strictly", "_split_by_arrow"):
        with monkeypatch.context() as patch:
            # One that isn't called, and one that gives up.
            patch.setattr(module, splitter, lambda *_: None)
            tables.append(read(tmp_path, text))
    fast, strict = tables
    assert (fast.names, fast.rows) == (strict.names, strict.rows)
    for name in fast.names:
        assert values(fast, name) == values(strict, name)


def test_pyarrow_accepts_the_same_numbers_as_python(tmp_path: Path) -> None:
    table = read(tmp_path, "a,b,c\n\u0663, 5.,nan(1)\n\x1c7,+.5,2\n")
    assert values(table, "a") == [3, 7]
    assert values(table, "b") == [5, 0.5]
    assert values(table, "c") == ["nan(1)", "2"]


def test_delimiter_may_be_any_character(tmp_path: Path) -> None:
    table = read(tmp_path, "a§b\n1§x\n", delimiter="§")
    assert (values(table, "a"), values(table, "b")) == ([1], ["x"])


def test_table_larger_than_memory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Short fields take more memory than their text."""
    monkeypatch.setattr("pipeline.core.host.memory.read_available_bytes", lambda: 1_000_000)
    assert read(tmp_path, "a,b\n" + "1,2\n" * 10_000).rows == 10_000
    with pytest.raises(ValueError, match=r"its table would take .* of memory"):
        read(tmp_path, "a,b\n" + "1,2\n" * 50_000)


@pytest.mark.parametrize("delimiter", [",", ";", "\t", "|"])
@pytest.mark.parametrize("start", ["", "\n", "\r\n\r\n"])
def test_delimiter_is_detected(tmp_path: Path, delimiter: str, start: str) -> None:
    table = read(tmp_path, f"{start}a{delimiter}b\n1{delimiter}2\n")
    assert (values(table, "a"), values(table, "b")) == ([1], [2])


@pytest.mark.parametrize("encoding", ["utf-8", "UTF8", "utf_8", "U8"])
def test_byte_order_mark_is_not_in_a_name(tmp_path: Path, encoding: str) -> None:
    table = read(tmp_path, b"\xef\xbb\xbfa,b\n1,2\n", encoding=encoding)
    assert table.names == ("a", "b")


def test_space_separated_columns_are_detected(tmp_path: Path) -> None:
    table = read(tmp_path, "  a    b c \n 1  2.5    x  \n\n10 -3   'y z'\n".replace("'", '"'))
    assert [values(table, name) for name in "abc"] == [[1, 10], [2.5, -3], ["x", "y z"]]


def test_spaces_do_not_split_a_single_column(tmp_path: Path) -> None:
    table = read(tmp_path, "house price\n100\n200\n")
    assert values(table, "house price") == [100, 200]


def pack(content: bytes, kind: str, *others: str) -> bytes:
    if kind == "gzip":
        return gzip.compress(content, mtime=0)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("folder/", "folder/a.csv", "__MACOSX/._a.csv", *others):
            archive.writestr(name, b"" if name.endswith("/") else content)
    return buffer.getvalue()


@pytest.mark.parametrize("kind", ["gzip", "zip"])
def test_compressed_files_are_read(tmp_path: Path, kind: str) -> None:
    text = "a;b\n1;x\n2;y\nz;\u00fc\n"
    table = read(tmp_path, pack(text.encode("utf-16"), kind), encoding="utf-16")
    assert values(table, "a") == ["1", "2", "z"]
    assert values(table, "b") == ["x", "y", "\u00fc"]
    assert table.locate(2) == "line 4"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (pack(b"a,b\n1,2\n", "gzip")[:-9], "can't be unpacked: Compressed file ended"),
        (pack(b"a,b\n1,2\n", "gzip")[:-6] + b"123456", "can't be unpacked: CRC check failed"),
        (pack(b"a,b\n1,2\n", "zip")[:-30], "can't be unpacked: File is not a zip file"),
        (pack(b"a,b\n1,2\n", "zip", "b.csv"), "holds 2 files ('folder/a.csv', 'b.csv'); a zip"),
    ],
    ids=["truncated gzip", "checksum", "truncated zip", "two files"],
)
def test_unreadable_compressed_files_are_refused(
    tmp_path: Path, content: bytes, message: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        read(tmp_path, content)


@pytest.mark.parametrize("kind", ["gzip", "zip"])
def test_excessive_unpacked_size_is_refused(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unpacked_file, "MOST_UNPACKED_BYTES", 1 << 20)
    read(tmp_path, pack(b"a\n" + b"1\n" * 500_000, kind))
    with pytest.raises(ValueError, match="unpacks to more than 1,048,576 bytes, over 100 times"):
        read(tmp_path, pack(b"a\n" + b"1\n" * 1_000_000, kind))


def test_spreadsheet_exports_are_read(tmp_path: Path) -> None:
    text = 'größe;"a;b"\r\n1,5;"say ""hi"""\r\n\r\n2,25;x\r\n'
    table = read(tmp_path, b"\xef\xbb\xbf" + text.encode(), decimal=",")
    assert (values(table, "größe"), values(table, "a;b")) == ([1.5, 2.25], ['say "hi"', "x"])
    table = read(tmp_path, text.encode("latin-1"), decimal=",", encoding="latin-1")
    assert values(table, "größe") == [1.5, 2.25]
    table = read(tmp_path, text.encode("utf-16"), decimal=",", encoding="utf-16")
    assert values(table, "größe") == [1.5, 2.25]
    assert values(read(tmp_path, "1,2\n3,4", header=False), "column 2") == [2, 4]
    assert list(read(tmp_path, ",a\n0,5\n1,6\n").columns) == ["a"]


def test_python_only_number_forms_are_texts(tmp_path: Path) -> None:
    assert values(read(tmp_path, "a\n1_000\n2_0\n"), "a") == ["1_000", "2_0"]
    assert values(read(tmp_path, "a\n-999\n-999.0\n3\n", missing_values=("-999",)), "a") == [
        None,
        None,
        3,
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("a,b\n1,2\n1,2,3\n", "line 3: has 3 fields for 2 columns; quote"),
        ("a,b\n1\n", "line 2: has 1 fields for 2 columns"),
        ("a,a\n1,2\n", "has the column a more than once"),
        ('a,b\n"1,2\n', "line 2: unexpected end of data"),
        ('a,b\n1,"', "line 2: unexpected end of data"),
        ('a,b\n1\n"1"2,3\n', "line 2: has 1 fields"),
        ('a,b\n"1"2,3\n', "line 2: ',' expected after '\"'"),
        ("a\n1\n1\0\n", "line 3: has a NUL character"),
        (b"a\n1\n\xff\n", "0xff, which isn't utf-8; set dataset.encoding, such as latin-1"),
        ("a\n1\ninf\n", r"line 3: a = inf: must be a number of at most 3.403e\+38"),
        ("a\n1e308\n", r"line 2: a = 1e\+308: must be a number of at most"),
    ],
)
def test_invalid_table_is_named(tmp_path: Path, content: str | bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(tmp_path, content)


@pytest.mark.parametrize("quote", ["", '"'])
def test_field_of_more_than_a_mebibyte_is_read(tmp_path: Path, quote: str) -> None:
    long = "x" * (2**20 + 1)
    limit = csv.field_size_limit()
    # The text after the closing quote needs the stricter reader.
    table = read(tmp_path, f'a,b\n1,{quote}{long}{quote}\n2,a"b\n')
    assert values(table, "b") == [long, 'a"b']
    assert csv.field_size_limit() == limit


def test_overlong_field_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 1000)
    with pytest.raises(ValueError, match="line 12: field larger than field limit"):
        read(tmp_path, 'a\n"' + ("x" * 99 + "\n") * 20 + '"')


def test_overlong_line_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LINE", 1000)
    with pytest.raises(ValueError, match="line 2: has 1,000 characters or more"):
        read(tmp_path, "a\n" + "1," * 1000)


FIELD = st.one_of(
    st.floats(allow_nan=False, allow_infinity=False, width=32).map(repr),
    st.sampled_from(["", "NA", "red", "1e5", " 3 ", "it's", 'say "x"', "a,b", "two\nlines"]),
)


@pytest.mark.medium
@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(FIELD, FIELD), min_size=1, max_size=12), st.integers(1, 5))
def test_columns_match_a_plain_csv_reader(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[str, str]], chunk: int
) -> None:
    """Whatever the chunks, a column is numbers where each value is one or missing, else texts."""
    folder = tmp_path_factory.mktemp("csv")
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([("a", "b"), *rows])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK", chunk)
        form = TableFormat(missing_values=MISSING, delimiter=",")
        table = read_csv(folder / "a.csv", form, lambda name: "auto")
    for name, column in zip("ab", zip(*rows, strict=True), strict=True):
        bare = [None if text.strip() in MISSING else text.strip() for text in column]
        try:
            wanted: list[Any] = [None if text is None else float(text) for text in bare]
        except ValueError:
            wanted = bare
        assert values(table, name) == wanted
    assert np.all([table.locate(row).startswith("line ") for row in range(table.rows)])


def test_delimiters_in_quotes_are_not_counted(tmp_path: Path) -> None:
    table = read(tmp_path, '"income, net";"rate, gross, %";x\n1;2;3\n')
    assert table.names == ("income, net", "rate, gross, %", "x")


def test_missing_number_may_have_a_decimal_comma(tmp_path: Path) -> None:
    table = read(tmp_path, "a;b\n-1,50;1\n2,5;2\n", decimal=",", missing_values=("", "-1,5"))
    assert values(table, "a") == [None, 2.5]
