"""What was made of a run: each path once, and lines of strangers are passed over."""

from __future__ import annotations

import json
import os
from pathlib import Path

from pipeline.stages.record.descendants import (
    DESCENDANTS,
    Descendant,
    note_descendant,
    read_descendants,
)


def test_path_is_listed_once_at_its_last_time(tmp_path: Path) -> None:
    assert read_descendants(tmp_path) == []
    note_descendant(tmp_path, "exported", tmp_path / "export")
    note_descendant(tmp_path, "converted", tmp_path / "weights.npz")
    note_descendant(tmp_path, "exported", tmp_path / "export")
    made = [(entry.made, entry.to) for entry in read_descendants(tmp_path)]
    assert made == [
        ("exported", str(tmp_path / "export")),
        ("converted", str(tmp_path / "weights.npz")),
    ]


def test_path_that_is_not_utf8_is_listed(tmp_path: Path) -> None:
    target = os.fsdecode(b"/exports/caf\xe9")
    note_descendant(tmp_path, "exported", Path(target))
    assert [entry.to for entry in read_descendants(tmp_path)] == [target]


def test_invalid_lines_are_skipped(tmp_path: Path) -> None:
    entries = [
        {"made": "sold", "to": "/a"},
        {"made": "exported", "to": 1},
        ["exported"],
        {"made": "exported", "to": "/b", "at": 5},
    ]
    lines = [json.dumps(entry) for entry in entries]
    text = "\n".join([*lines, "{", "[" * 100_000])
    (tmp_path / DESCENDANTS).write_bytes(text.encode() + b"\n\xff\xfe")
    assert read_descendants(tmp_path) == [Descendant("exported", "/b")]


def test_removed_directory_is_not_an_error(tmp_path: Path) -> None:
    note_descendant(tmp_path / "gone", "exported", tmp_path)
    assert not (tmp_path / "gone").exists()


def test_link_is_not_written_through(tmp_path: Path) -> None:
    target = tmp_path / "other.jsonl"
    target.write_text("")
    (tmp_path / DESCENDANTS).symlink_to(target)
    note_descendant(tmp_path, "exported", tmp_path)
    assert target.read_text() == ""
