"""Text files of a folder, their lines, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.data.text.text_files import list_text_files, read_files, read_text_lines


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
