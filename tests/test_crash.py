"""The short version of `python -m tests.crash`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.killing import Crashes


@pytest.mark.slow
def test_killed_runs_end_as_one_that_never_was(cache: Path, tmp_path: Path) -> None:
    """kill -9, at random moments and while a checkpoint is written; K-05."""
    crashes = Crashes(tmp_path, 7, 400, 40, [f"cache.root={cache}"])
    while crashes.tally.kills < 3:
        crashes.kill_one_run(3)
    tally = crashes.tally
    assert tally.wrong == []
    assert (tally.kills, tally.resumes > 0) == (3, True)
