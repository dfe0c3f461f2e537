from __future__ import annotations

import errno
import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.core.files import atomic_write, bounded_read
from pipeline.core.files.knowledge_bank import (
    BANK_VERSION,
    Banks,
    Entry,
    Round,
    read_bank,
    write_result,
)

ENTRIES: dict[str, Entry] = {"b": {"us": 1.5, "ways": ["x", 2]}, "a": {"us": 3}}


def checked(entry: Entry) -> Entry:
    """Times in nanoseconds, as an example of what the user of a bank may make of an entry."""
    if not float(entry["us"]) > 0:
        raise ValueError(f"us = {entry['us']}")
    return {"ns": 1000 * float(entry["us"])}


def test_missing_bank_is_empty(tmp_path: Path) -> None:
    assert read_bank(tmp_path / "bank.json", checked) == {}
    assert list(tmp_path.iterdir()) == []


def test_written_entries_are_read_through_the_check(tmp_path: Path) -> None:
    bank = tmp_path / "new" / "folder" / "bank.json"
    Banks(bank, None, dict).add(ENTRIES)
    assert read_bank(bank, dict) == ENTRIES
    assert read_bank(bank, checked) == {"a": {"ns": 3000}, "b": {"ns": 1500}}
    assert {file.name for file in bank.parent.iterdir()} == {".lock", "bank.json"}


def test_missing_folders_of_a_bank_are_made_private(tmp_path: Path) -> None:
    """Other users must not add entries, whatever the umask is."""
    before = os.umask(0)
    try:
        Banks(tmp_path / "new" / "folder" / "bank.json", None, dict).add(ENTRIES)
    finally:
        os.umask(before)
    for name in ("new", "new/folder"):
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o700


def test_equal_banks_are_equal_files(tmp_path: Path) -> None:
    """So that one kept under version control changes where its entries do."""
    one, other = tmp_path / "one.json", tmp_path / "other.json"
    Banks(one, None, dict).add(ENTRIES)
    Banks(other, None, dict).add(dict(reversed(list(ENTRIES.items()))))
    assert one.read_bytes() == other.read_bytes()
    assert list(json.loads(one.read_text())["entries"]) == ["a", "b"]


def test_failed_write_leaves_the_bank_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bank = tmp_path / "bank.json"
    Banks(bank, None, dict).add(ENTRIES)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(atomic_write.os, "replace", full)
    with pytest.raises(RunError, match=r"bank\.json: .* can't be written: no space left"):
        Banks(bank, None, dict).add({"c": {"us": 2}})
    assert read_bank(bank, dict) == ENTRIES


def test_io_error_is_not_reported_as_wrong_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not be deleted for that."""
    bank = tmp_path / "bank.json"
    Banks(bank, None, dict).add(ENTRIES)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error", str(bank))

    monkeypatch.setattr(bounded_read, "read_text", broken)
    with pytest.raises(RunError) as caught:
        read_bank(bank, dict)
    assert str(caught.value) == f"{bank}: the knowledge bank can't be read: Input/output error"


def test_concurrent_additions_are_all_stored(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    entries: list[dict[str, Entry]] = [{str(i): {"us": i + 1}} for i in range(40)]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda entry: Banks(bank, None, dict).add(entry), entries))
    assert read_bank(bank, dict) == {str(i): {"us": i + 1} for i in range(40)}
    assert {file.name for file in tmp_path.iterdir()} == {".lock", "bank.json"}


def test_unlockable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match=r"bank\.json: the knowledge bank can't be written: "):
        Banks(tmp_path / "file" / "bank.json", None, dict).add(ENTRIES)


def test_rounds_have_the_documented_format() -> None:
    """A-03: the best time in microseconds, and when the round ended."""
    assert str(Round(82.0, datetime(2020, 8, 8, 18, 3, 38))) == "[82, 2020-08-08 18:03:38]"


BROKEN = {
    "empty": b"",
    "truncated": b'{"version": 1, "entries": {"a"',
    "a list": b"[]",
    "a number": b"7",
    "no version": b'{"entries": {}}',
    "no entries": b'{"version": 1}',
    "a list of entries": b'{"version": 1, "entries": []}',
    "an entry without its time": b'{"version": 1, "entries": {"a": {}}}',
    "an entry that is a number": b'{"version": 1, "entries": {"a": 7}}',
    "an entry that is refused": b'{"version": 1, "entries": {"a": {"us": 0}}}',
    "not text": b"\xff\xfe\x00",
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_foreign_file_in_place_of_a_bank_is_named_and_unchanged(
    content: bytes, tmp_path: Path
) -> None:
    bank = tmp_path / "bank.json"
    bank.write_bytes(content)
    with pytest.raises(RunError) as caught:
        read_bank(bank, checked)
    assert str(caught.value).startswith(f"{bank}: not a knowledge bank of AutoTune (")
    assert str(caught.value).endswith("); delete it or name another file")
    assert bank.read_bytes() == content


def test_bank_of_another_version_is_refused(tmp_path: Path) -> None:
    bank = tmp_path / "bank.json"
    bank.write_text(json.dumps({"version": BANK_VERSION + 1, "entries": {}}))
    with pytest.raises(RunError, match=r"\(ValueError: version 2; must be 1\)"):
        read_bank(bank, checked)


def test_folder_is_refused_as_bank(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="not a knowledge bank of AutoTune"):
        read_bank(tmp_path, checked)


def test_result_file_is_named_after_process_and_time(tmp_path: Path) -> None:
    """A-03."""
    moment = datetime(2020, 8, 8, 18, 3, 38, 42_999)
    path = write_result({"result_data": {"before_tune": 2.5}}, tmp_path / "new", moment)
    assert path == tmp_path / "new" / f"tune_result_pid{os.getpid()}_20200808_180338042.json"
    assert json.loads(path.read_text()) == {"result_data": {"before_tune": 2.5}}
