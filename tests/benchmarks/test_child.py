"""Processes at the other end of a pipe."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

import pytest

from benchmarks.child import child_process


def tell(pipe: Connection, *names: str) -> None:
    """Send what the environment of this process has under the names."""
    pipe.send([os.environ.get(name) for name in names])


@pytest.mark.slow
def test_child_has_a_separate_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GIVEN", "the shell's")
    before = dict(os.environ)
    added = {"GIVEN": "ours", "ADDED": "1"}
    with child_process(tell, *added, daemon=True, environment=added) as (_, pipe):
        assert os.environ == before
        assert pipe.recv() == ["the shell's", "1"]
