"""JSON that any parser reads: numbers that it has no form for become null."""

from __future__ import annotations

import errno
import json
import math
import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import (
    commit,
    convert_write_errors,
    format_json,
    sync,
    sync_ancestors,
    write_json,
    write_whole,
)
from tests.engine.monitors.disk import files_end_at

values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def test_file_is_replaced_atomically(tmp_path: Path) -> None:
    for text in ("first, and longer", "second"):
        write_whole(tmp_path / "file", text)
        assert (tmp_path / "file").read_text() == text
    assert len(list(tmp_path.iterdir())) == 1


def test_full_disk_leaves_the_file_unchanged(tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "before")
    with files_end_at(3), pytest.raises(OSError, match="File too large") as caught:
        write_whole(tmp_path / "file", "afterwards")
    assert caught.value.filename == str(tmp_path / "file")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]


def test_missing_folder_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        write_whole(tmp_path / "gone" / "file", "text")
    assert caught.value.filename == str(tmp_path / "gone" / "file")


def test_link_in_place_of_the_draft_is_not_written_through(tmp_path: Path) -> None:
    """In a folder of somebody else, who can guess its name."""
    (tmp_path / "elsewhere").write_text("mine")
    draft = tmp_path / f"file.{socket.gethostname()}.{os.getpid()}.part"
    draft.symlink_to(tmp_path / "elsewhere")
    write_whole(tmp_path / "file", "text")
    assert (tmp_path / "elsewhere").read_text() == "mine"
    assert not (tmp_path / "file").is_symlink()
    assert (tmp_path / "file").read_text() == "text"


def test_device_file_is_written_and_not_replaced(tmp_path: Path) -> None:
    null = tmp_path / "null"
    null.symlink_to("/dev/null")
    write_whole(null, "text")
    assert null.is_char_device()
    full = tmp_path / "full"
    full.symlink_to("/dev/full")
    with pytest.raises(OSError, match="No space left on device") as caught:
        write_whole(full, "text")
    assert caught.value.filename == str(full)
    assert full.is_char_device()
    assert len(list(tmp_path.iterdir())) == 2


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The syncs and renames, in order, with the name of each file or folder."""
    calls: list[str] = []
    fsync, replace = os.fsync, os.replace

    def record_sync(descriptor: int) -> None:
        calls.append(f"sync {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")
        fsync(descriptor)

    def record_rename(draft: Path, path: Path) -> None:
        calls.append(f"rename to {Path(path).name}")
        replace(draft, path)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "replace", record_rename)
    return calls


def test_file_is_synced_before_rename(calls: list[str], tmp_path: Path) -> None:
    write_whole(tmp_path / "file", "text")
    draft = f"file.{socket.gethostname()}.{os.getpid()}.part"
    assert calls == [f"sync {draft}", "rename to file", f"sync {tmp_path.name}"]


def test_folder_content_is_synced_before_rename(calls: list[str], tmp_path: Path) -> None:
    (tmp_path / "draft" / "inner").mkdir(parents=True)
    (tmp_path / "draft" / "inner" / "file").touch()
    (tmp_path / "draft" / "other").touch()
    commit(tmp_path / "draft", tmp_path / "folder")
    before, after = calls[: calls.index("rename to folder")], calls[-2:]
    assert sorted(before) == ["sync draft", "sync file", "sync inner", "sync other"]
    assert before.index("sync file") < before.index("sync inner") < before.index("sync draft")
    assert after == ["rename to folder", f"sync {tmp_path.name}"]


def test_ancestor_folders_are_synced_up_to_the_mount(
    calls: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "outputs" / "day" / "run").mkdir(parents=True)
    monkeypatch.setattr(os.path, "ismount", lambda path: path == tmp_path)
    monkeypatch.chdir(tmp_path)
    sync_ancestors(Path("outputs/day/run"))
    assert calls == ["sync day", "sync outputs", f"sync {tmp_path.name}"]


def test_failed_sync_names_the_file_and_leaves_it_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "file", "before")
    monkeypatch.setattr(os, "fsync", _refuse(errno.EIO))
    with pytest.raises(OSError, match="Input/output error") as caught:
        write_whole(tmp_path / "file", "afterwards")
    assert caught.value.filename == str(tmp_path / "file")
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("file", "before")]


def test_unsupported_sync_is_ignored_only_for_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", _refuse(errno.EINVAL))
    (tmp_path / "file").touch()
    sync(tmp_path)
    with pytest.raises(OSError, match="Invalid argument") as caught:
        sync(tmp_path / "file")
    assert caught.value.filename == str(tmp_path / "file")


def _refuse(number: int) -> Callable[[int], None]:
    def refuse(descriptor: int) -> None:
        raise OSError(number, os.strerror(number))

    return refuse


def test_non_utf8_names_are_written_escaped(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\xc3\xa9.png")
    write_whole(tmp_path / "a.csv", f"file\n{name}\n")
    assert (tmp_path / "a.csv").read_text(encoding="utf-8") == "file\n\\udcff\u00e9.png\n"


def test_write_error_names_the_file_in_a_folder(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, convert_write_errors(tmp_path):
        (tmp_path / "missing" / "file").write_text("")
    assert str(caught.value) == (
        f"{tmp_path / 'missing' / 'file'}: can't be written: No such file or directory"
    )


def test_write_error_without_a_file_or_a_number_has_the_path_and_the_words(tmp_path: Path) -> None:
    with pytest.raises(RunError) as caught, convert_write_errors(tmp_path):
        raise OSError("the disk is gone")
    assert str(caught.value) == f"{tmp_path}: can't be written: the disk is gone"


def without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def refuse(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.medium
@given(value=values)
def test_json_round_trips_with_null_for_nan_and_infinities(value: Any) -> None:
    assert json.loads(format_json(value), parse_constant=refuse) == without_nan(value)


def test_tuples_are_lists_and_an_indent_makes_lines() -> None:
    assert format_json((1.5, math.nan), indent=1) == "[\n 1.5,\n null\n]"


def test_unwritable_file_is_a_run_error(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", {"loss": float("nan")})
    assert (tmp_path / "a.json").read_text() == '{\n "loss": null\n}\n'
    with pytest.raises(RunError, match=r"missing/a\.json: can't be written: No such file"):
        write_json(tmp_path / "missing" / "a.json", {})
