from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.core.files.bounded_read import MAX_DEPTH, read_bytes, read_json


@pytest.mark.parametrize("size", [0, 1, 99, 100])
def test_file_within_the_limit_is_read_completely(size: int, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(range(100))[:size])
    assert read_bytes(file, 100) == bytes(range(100))[:size]


def test_larger_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"x" * 101)
    with pytest.raises(ValueError, match="has more than 100 bytes"):
        read_bytes(file, 100)


def test_proc_file_without_size_is_read_completely() -> None:
    assert Path("/proc/self/status").stat().st_size == 0
    assert read_bytes(Path("/proc/self/status")).startswith(b"Name:")


def test_json_nesting_is_bounded_outside_strings(tmp_path: Path) -> None:
    file = tmp_path / "file.json"
    deepest = "[" * MAX_DEPTH + "]" * MAX_DEPTH
    file.write_text(deepest)
    assert read_json(file)
    file.write_text('["' + "[{" * 1000 + '"]')
    assert read_json(file) == ["[{" * 1000]
    file.write_text(f"[{deepest}]")
    with pytest.raises(ValueError, match="nested too deeply"):
        read_json(file)
