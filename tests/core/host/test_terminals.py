"""A pipe and a notebook's pseudo-terminal show no frames of bars."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.core.host.terminals import KERNEL, can_redraw


@pytest.mark.parametrize(
    ("variables", "expected"),
    [({}, True), ({KERNEL: "12"}, False), ({"TERM": "dumb"}, False)],
)
def test_terminal_is_redrawn_unless_a_notebook_reads_it(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: bool
) -> None:
    monkeypatch.delenv(KERNEL, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    leader, follower = os.openpty()
    with open(leader, "rb"), open(follower, "w") as terminal:
        assert can_redraw(terminal) == expected


def test_files_are_not_redrawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv(KERNEL, raising=False)
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "file").open("w") as file:
        assert not can_redraw(file)
