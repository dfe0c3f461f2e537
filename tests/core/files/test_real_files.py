from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.core.files.real_files import (
    open_real,
    open_unshared,
    require_real,
    require_real_folder,
    require_real_trees,
)


def link(path: Path) -> None:
    path.symlink_to("elsewhere")


def loop(path: Path) -> None:
    path.symlink_to(path.name)


def plug(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as plugged:
        plugged.bind(str(path))


UNREAL: dict[str, tuple[Callable[[Path], None], str]] = {
    "link": (link, "is a link to elsewhere; "),
    "loop": (loop, "is a link to file; "),
    "pipe": (os.mkfifo, "isn't a regular file; remove it"),
    "socket": (plug, "isn't a regular file; remove it"),
}


@pytest.mark.parametrize("kind", UNREAL)
def test_links_and_special_files_are_named_and_not_opened(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)  # a socket's name may not be long
    make, told = UNREAL[kind]
    make(Path("file"))
    with pytest.raises(DataError, match=re.escape(f"file: {told}")):
        require_real(Path(), ["file"], [])
    with pytest.raises(DataError, match=re.escape(f"file: {told}")):
        require_real_folder(Path("file"))
    for opened in (open_real, open_unshared):
        with pytest.raises(OSError, match=r"link|regular|No such device"):
            opened(Path("file"), os.O_RDWR | os.O_CREAT)
    assert not Path("elsewhere").exists()


def test_wrong_kind_of_path_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="folder: is a directory, and must be a file"):
        require_real(tmp_path, ["folder"], [])
    with pytest.raises(DataError, match="file: is a file, and must be a directory"):
        require_real_trees(tmp_path, ["file"])


def test_hard_linked_file_is_refused_if_changed_in_place(tmp_path: Path) -> None:
    """A backup of hard links would be changed with the run."""
    (tmp_path / "file").touch()
    os.link(tmp_path / "file", tmp_path / "backup")
    require_real(tmp_path, ["file"], [])
    with pytest.raises(DataError, match=r"file: is a hard link: the file has 2 names"):
        require_real(tmp_path, ["file"], ["file"])
    with pytest.raises(OSError, match="is a hard link"):
        open_unshared(tmp_path / "file", os.O_WRONLY)


def test_links_are_listed_at_any_depth_and_never_followed(tmp_path: Path) -> None:
    deep = tmp_path / "tree" / "a" / "b"
    deep.mkdir(parents=True)
    (deep / "file").touch()
    require_real_trees(tmp_path, ["tree", "missing"])
    (deep / "up").symlink_to(tmp_path)
    with pytest.raises(DataError, match=re.escape(f"{deep / 'up'}: is a link to {tmp_path}; ")):
        require_real_trees(tmp_path, ["tree"])


def test_control_characters_in_names_are_escaped(tmp_path: Path) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "\x1b[2Jx\n").symlink_to("y\nz")
    with pytest.raises(DataError) as caught:
        require_real_trees(tmp_path, ["tree"])
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
