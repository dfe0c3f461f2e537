from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.checkpoint_folder import (
    find_strangers,
    list_saved_steps,
    make_checkpoint_path,
    parse_checkpoint_step,
    remove_checkpoint,
    remove_draft,
    remove_drafts,
    rename_aside,
)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Checkpoints 5 and 40, beside whatever else may be called so."""
    root = tmp_path / "checkpoints"
    for step in (5, 40):
        (make_checkpoint_path(root, step) / "state").mkdir(parents=True)
        (make_checkpoint_path(root, step) / "manifest.json").touch()
    for name in ("2019", "²", "४४१", "007", "+1", "6.0", "damaged-7-1", "notes of 5", "inf"):
        (root / name).mkdir()
    (root / "6").touch()
    (root / "8").symlink_to(root / "5")
    (root / "9").symlink_to(root / "nowhere")
    return root


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("0", 0),
        ("12", 12),
        ("007", None),
        ("²", None),
        ("４４１", None),
        ("-1", None),
        ("1\n", None),
    ],
)
def test_checkpoint_step_requires_ascii_decimal_name(name: str, step: int | None) -> None:
    assert parse_checkpoint_step(Path("checkpoints") / name) == step


def test_folder_with_arrays_or_manifest_is_a_checkpoint(root: Path) -> None:
    assert list_saved_steps(root) == [5, 40]
    shutil.rmtree(make_checkpoint_path(root, 5) / "state")
    (make_checkpoint_path(root, 40) / "manifest.json").unlink()
    assert list_saved_steps(root) == [5, 40]


def test_numeric_name_without_checkpoint_is_a_stranger(root: Path) -> None:
    numbers = ["2019", "²", "४४१", "007", "+1", "6.0", "6", "8", "9"]
    assert {path.name for path in find_strangers(root)} == set(numbers)


def test_checkpoint_with_zero_padded_step_is_a_stranger(root: Path) -> None:
    (root / "5").rename(root / "05")
    assert list_saved_steps(root) == [40]
    assert root / "05" in find_strangers(root)


@pytest.mark.parametrize("number", [errno.EACCES, errno.ENOMEM])
def test_unreadable_entry_is_an_error_in_both_listings(
    number: int, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_to_stat(root / "40" / "manifest.json", number, monkeypatch)
    for listing in (list_saved_steps, find_strangers):
        with pytest.raises(OSError, match=os.strerror(number)):
            listing(root)


def refuse_to_stat(file: Path, number: int, patch: pytest.MonkeyPatch) -> None:
    """Let the system refuse to show a file."""
    stat = os.stat

    def refuse(path: Any, *more: Any, **named: Any) -> os.stat_result:
        if str(path) == str(file):
            raise OSError(number, os.strerror(number), str(file))
        return stat(path, *more, **named)

    patch.setattr(os, "stat", refuse)


def test_listings_of_missing_folder_are_empty(tmp_path: Path) -> None:
    assert (
        list_saved_steps(tmp_path / "checkpoints") == find_strangers(tmp_path / "checkpoints") == []
    )


def test_rename_aside_does_not_overwrite(root: Path) -> None:
    (root / "foreign-2019-1").symlink_to(root / "nowhere")
    (root / "2019" / "holiday.jpg").touch()
    assert rename_aside(root / "2019", "foreign").name == "foreign-2019-2"
    assert (root / "foreign-2019-2" / "holiday.jpg").exists()


def test_only_drafts_are_removed(root: Path, tmp_path: Path) -> None:
    (root / "45.orbax-checkpoint-tmp" / "state").mkdir(parents=True)
    (root / "46.orbax-checkpoint-tmp").touch()
    (tmp_path / "precious").mkdir()
    (root / "47.orbax-checkpoint-tmp").symlink_to(tmp_path / "precious")
    (root / "mine.orbax-checkpoint-tmp").mkdir()
    before = {path.name for path in root.iterdir()}
    remove_drafts(root)
    gone = before - {path.name for path in root.iterdir()}
    assert gone == {f"{step}.orbax-checkpoint-tmp" for step in (45, 46, 47)}
    assert (tmp_path / "precious").is_dir()


def test_draft_that_the_system_protects_stays(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error would hide the one for which the draft is removed."""

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    draft = root / "46.orbax-checkpoint-tmp"
    draft.touch()
    monkeypatch.setattr(Path, "unlink", refuse)
    remove_draft(draft)
    remove_drafts(root)
    assert draft.exists()


def test_partly_removed_checkpoint_is_not_listed(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process may be killed meanwhile, or a file be open elsewhere."""
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_checkpoint(root / "5")
    assert list_saved_steps(root) == [40]
    monkeypatch.undo()
    remove_drafts(root)
    assert not list(root.glob("5*"))
