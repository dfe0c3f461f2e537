"""Text files of a folder, lines and rows, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.text.text_files import (
    list_text_files,
    make_locate,
    read_files,
    read_text_columns,
    read_text_lines,
)


def write(path: Path, text: str | bytes) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_matching_files_are_listed_in_order(tmp_path: Path) -> None:
    names = ("b.txt", "a.txt", "deep/c.txt", "d.csv")
    for name in names:
        write(tmp_path / name, name)
    files = list_text_files(tmp_path, "**/*.txt")
    assert [str(file.relative_to(tmp_path)) for file in files] == ["a.txt", "b.txt", "deep/c.txt"]
    assert read_files(files) == [b"a.txt", b"b.txt", b"deep/c.txt"]
    assert list_text_files(tmp_path / "d.csv", "*.txt") == [tmp_path / "d.csv"]


def test_folder_without_texts_and_outside_link_are_refused(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    with pytest.raises(DataError, match="texts: there is no such file or folder"):
        list_text_files(folder, "*.txt")
    folder.mkdir()
    with pytest.raises(DataError, match=r"holds no file that matches dataset\.pattern = '?\*\.txt"):
        list_text_files(folder, "*.txt")
    (folder / "a.txt").symlink_to(write(tmp_path / "secret", "x"))
    with pytest.raises(DataError, match=r"a\.txt: leads out of"):
        list_text_files(folder, "*.txt")


def test_empty_lines_are_left_out(tmp_path: Path) -> None:
    assert read_text_lines(write(tmp_path / "a.txt", " one \n\n\ttwo\r\n")) == ["one", "two"]
    marked = "\ufeffone\r\ntwo\x0c\u2028 more\rthree"  # a file of Windows
    assert read_text_lines(write(tmp_path / "a.txt", marked)) == [
        "one",
        "two\x0c\u2028 more",
        "three",
    ]
    with pytest.raises(DataError, match="holds no text; must have one on each line"):
        read_text_lines(write(tmp_path / "b.txt", " \n\n"))


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
