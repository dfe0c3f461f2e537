from __future__ import annotations

import grp
import os
import pwd
import re
import socket
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.core.files.trusted_files import (
    find_foreign_owner,
    find_writers,
    make_private,
    open_real,
    open_unshared,
    require_real,
    require_real_folder,
    require_real_trees,
)

ME, OWN_GROUP, TEAM, PEERS = 1000, 1000, 2000, 3000


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


@pytest.fixture
def umask(request: pytest.FixtureRequest) -> Iterator[None]:
    before = os.umask(request.param)
    yield
    os.umask(before)


@pytest.mark.usefixtures("umask")
@pytest.mark.parametrize("umask", [0, 0o002, 0o077], indirect=True)
def test_created_folder_is_private_for_any_umask(tmp_path: Path) -> None:
    make_private(tmp_path / "a" / "b" / "c")
    make_private(tmp_path / "a" / "b")
    for name in ("a", "a/b", "a/b/c"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_existing_folder_keeps_its_mode(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    (tmp_path / "link").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "link"):
        make_private(folder)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o755


def test_file_in_place_of_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for wanted in (tmp_path / "file", tmp_path / "file" / "folder"):
        with pytest.raises(NotADirectoryError):
            make_private(wanted)


@pytest.fixture
def users(monkeypatch: pytest.MonkeyPatch) -> None:
    """I am in a group of my own, in one with others, and in one that has my group's name."""
    me = pwd.struct_passwd(("me", "x", ME, OWN_GROUP, "", "/", "/"))
    groups = {
        OWN_GROUP: grp.struct_group(("me", "x", OWN_GROUP, [])),
        TEAM: grp.struct_group(("team", "x", TEAM, ["me", "you"])),
        PEERS: grp.struct_group(("me", "x", PEERS, ["me"])),
    }
    names = {ME: me, 7: pwd.struct_passwd(("you", "x", 7, TEAM, "", "/", "/"))}
    monkeypatch.setattr(os, "geteuid", lambda: ME)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: names[uid])
    monkeypatch.setattr(grp, "getgrgid", lambda gid: groups[gid])


def found(mode: int, uid: int = ME, gid: int = OWN_GROUP) -> os.stat_result:
    return os.stat_result((stat.S_IFDIR | mode, 1, 1, 1, uid, gid, 0, 0, 0, 0))


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("mode", "gid", "writers"),
    [
        (0o700, TEAM, None),
        (0o755, TEAM, None),
        (0o775, OWN_GROUP, None),
        (0o775, TEAM, "group team"),
        (0o775, PEERS, "group me"),
        (0o775, 4000, "group 4000"),
        (0o777, OWN_GROUP, "everybody"),
        (0o1777, OWN_GROUP, "everybody"),
    ],
)
def test_writers_besides_the_user_are_named(mode: int, gid: int, writers: str | None) -> None:
    """A group that has nobody but me in it writes as I do: the umask 002 of many systems."""
    assert find_writers(found(mode, gid=gid)) == writers


@pytest.mark.usefixtures("users")
@pytest.mark.parametrize(
    ("uid", "owner"), [(ME, None), (0, None), (7, "user you"), (4000, "user 4000")]
)
def test_foreign_owner_is_neither_user_nor_root(uid: int, owner: str | None) -> None:
    assert find_foreign_owner(found(0o700, uid=uid)) == owner


def test_group_of_unknown_user_counts_as_a_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 4_000_000)
    assert find_writers(found(0o775, gid=4_000_000)) == "group 4000000"
    assert find_foreign_owner(found(0o775, uid=ME)) is not None
