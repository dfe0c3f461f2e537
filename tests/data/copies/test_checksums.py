from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import pytest

from pipeline.data.copies import checksums
from pipeline.data.copies.checksums import compute_checksum, format_checksums, has_recorded_sums


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The algorithm of every checksum that is computed."""
    original, algorithms = hashlib.file_digest, []

    def digest(content: Any, start: Any) -> Any:
        algorithms.append(start().name)
        return original(content, start)

    monkeypatch.setattr(checksums.hashlib, "file_digest", digest)
    return algorithms


def test_unchanged_file_is_read_once(tmp_path: Path, computed: list[str]) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    for _ in range(3):
        assert compute_checksum(file) == hashlib.sha256(b"abc").hexdigest()
        assert compute_checksum(file, "md5") == hashlib.md5(b"abc").hexdigest()
    assert computed == ["sha256", "md5"]


def test_change_is_detected_with_restored_mtime(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"abc")
    before = file.stat()
    compute_checksum(file)
    while file.stat().st_ctime_ns == before.st_ctime_ns:  # the clock of files ticks slowly
        file.write_bytes(b"abd")
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert compute_checksum(file) == hashlib.sha256(b"abd").hexdigest()


def test_recorded_sums_hold_for_unchanged_files(tmp_path: Path) -> None:
    names = ("a", "b")
    assert not has_recorded_sums(tmp_path, names)
    for name in names:
        (tmp_path / name).write_text(name)
    assert not has_recorded_sums(tmp_path, names)
    (tmp_path / "SHA256SUMS").write_text(format_checksums(tmp_path, names))
    assert has_recorded_sums(tmp_path, names)
    assert not has_recorded_sums(tmp_path, ["a"])
    (tmp_path / "b").unlink()
    os.mkfifo(tmp_path / "b")
    assert not has_recorded_sums(tmp_path, names)
