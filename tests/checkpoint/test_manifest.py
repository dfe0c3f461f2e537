"""A manifest lists every file of a checkpoint, or is not written."""

from __future__ import annotations

import errno
import itertools
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.checkpoint.checkpoint_folder import MANIFEST
from pipeline.checkpoint.manifest import (
    DamagedError,
    make_read_error,
    require_complete,
    write_manifest,
)
from pipeline.core.errors import RunError


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    for name in ("state/_METADATA", "host/metadata", "recipe/metadata"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("{}")
    return tmp_path


def refuse_listing(number: int, patch: pytest.MonkeyPatch) -> None:
    """Refuse the `number`-th listing of a folder."""
    calls, scandir = itertools.count(1), os.scandir

    def listing(folder: Any) -> Any:
        if next(calls) == number:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder))
        return scandir(folder)

    patch.setattr(os, "scandir", listing)


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_unlistable_folder_is_an_error_in_write_manifest(
    number: int, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The manifest would be short, the checkpoint damaged, and the one before it removed."""
    refuse_listing(number, monkeypatch)
    with pytest.raises(PermissionError):
        write_manifest(draft, "digest")
    assert not (draft / MANIFEST).exists()


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_unlistable_sealed_checkpoint_is_not_damaged(
    number: int, draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_manifest(draft, "digest")
    refuse_listing(number, monkeypatch)
    with pytest.raises(RunError, match="can't be read: Permission denied; its checkpoint may be"):
        require_complete(draft)


@pytest.mark.parametrize("number", [errno.ENOENT, errno.EIO, errno.ENOTDIR])
def test_missing_file_or_io_error_is_damage(number: int) -> None:
    error = make_read_error(Path("file"), OSError(number, os.strerror(number)))
    assert isinstance(error, DamagedError)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES])
def test_lack_of_descriptors_memory_or_rights_is_not_damage(number: int) -> None:
    error = make_read_error(Path("file"), OSError(number, os.strerror(number)))
    assert str(error).startswith(f"file: can't be read: {os.strerror(number)}; ")
    assert (type(error), error.exit_status) == (RunError, 1)
