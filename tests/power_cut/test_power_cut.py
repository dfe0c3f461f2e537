"""The short version of `python -m tests.power_cut`, and its simulated disk."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.preload import explain_skip
from tests.power_cut.cuts import KEEPS, RecordedCuts, read_files
from tests.power_cut.disk import Disk
from tests.power_cut.recording import Call


@pytest.mark.slow
def test_runs_after_power_cuts_equal_uninterrupted_runs(tmp_path: Path) -> None:
    if reason := explain_skip():
        pytest.skip(reason)
    with RecordedCuts(tmp_path.resolve(), 7) as cuts:
        for keep in KEEPS:
            cuts.cut_one_run(keep)
    assert cuts.tally.wrong == []
    assert cuts.tally.with_checkpoint > 0


SYNCED = [
    Call("open", "draft"),
    Call("write", "draft", 0, b"new"),
    Call("sync", "draft"),
    Call("rename", "draft", 0, b"file"),
    Call("sync", "."),
]
"""The safe way to replace a file."""


@pytest.fixture
def before(tmp_path: Path) -> Path:
    (tmp_path / "before").mkdir()
    (tmp_path / "before" / "file").write_bytes(b"old")
    return tmp_path / "before"


def list_outcomes(before: Path, calls: list[Call]) -> set[bytes | None]:
    """Return the possible contents of a file after some calls and a power cut."""

    def cuts() -> Iterator[bytes | None]:
        for seed in range(50):
            disk = Disk(before)
            left = before.with_name("left")
            disk.apply(calls)
            disk.cut_power(random.Random(seed), left)
            yield read_files(left).get("file")
            shutil.rmtree(left)

    return set(cuts())


@pytest.mark.medium
def test_file_synced_before_its_rename_is_always_complete(before: Path) -> None:
    for number in range(len(SYNCED)):
        assert list_outcomes(before, SYNCED[:number]) <= {b"old", b"new"}
    assert list_outcomes(before, SYNCED[:-1]) == {b"old", b"new"}
    assert list_outcomes(before, SYNCED) == {b"new"}


def test_file_not_synced_before_its_rename_can_be_empty(before: Path) -> None:
    calls = [call for call in SYNCED if call.path != "draft" or call.kind != "sync"]
    assert b"" in list_outcomes(before, calls)


def test_unsynced_removal_can_precede_earlier_calls(before: Path) -> None:
    """So no checkpoint remains if the old one is removed before the newer one is synced."""
    newer = [Call("mkdir", "draft"), Call("rename", "draft", 0, b"newer")]
    assert list_outcomes(before, [*newer, Call("remove", "file")]) == {b"old", None}


def test_appended_bytes_can_be_partially_written(before: Path) -> None:
    left = list_outcomes(before, [Call("write", "file", 3, b"er and older")])
    assert b"old" in left
    assert len(left) > 3
    assert all(content is not None and b"older and older".startswith(content) for content in left)


def test_disk_has_the_created_files(before: Path, tmp_path: Path) -> None:
    disk = Disk(before)
    disk.apply(
        [
            Call("mkdir", "inner"),
            Call("open", "inner/log"),
            Call("write", "inner/log", 0, b"one two"),
            Call("truncate", "inner/log", 4),
            Call("write", "inner/log", 4, b"three"),
            Call("rename", "inner", 0, b"outer"),
            Call("open", "file", 1),
        ]
    )
    disk.write(tmp_path / "written")
    assert read_files(tmp_path / "written") == {"outer/log": b"one three", "file": b""}
