from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from pipeline.files.atomic_write import write_whole
from tests.observe.disk import files_end_at


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    for text in ("first, and longer", "second"):
        write_whole(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_where_the_disk_is_full_the_file_stays_as_it_was(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "before")
    with files_end_at(3), pytest.raises(OSError, match="File too large") as caught:
        write_whole(tmp_path / "file", "afterwards")
    assert caught.value.filename == str(tmp_path / "file")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]


def test_a_folder_that_is_gone_is_reported_by_the_name_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "gone" / "file", "text")
    assert caught.value.filename == str(tmp_path / "gone" / "file")


def test_a_link_that_lies_in_wait_as_the_draft_is_not_written_through(tmp_path: Path) -> None:
    """In a folder of somebody else, who can guess its name."""
    (tmp_path / "elsewhere").write_text("mine")
    draft = tmp_path / f"file.{socket.gethostname()}.{os.getpid()}.part"
    draft.symlink_to(tmp_path / "elsewhere")
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_names_that_are_no_utf8_are_written_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xc3\xa9.png")
    write_whole(tmp_path / "a.csv", f"file\n{name}\n")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == "file\n\\udcff\u00e9.png\n"
