"""The short version of `python -m tests.crash`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.crash.killing import Crashes


@pytest.mark.slow
def test_killed_runs_equal_uninterrupted_runs(cache: Path, tmp_path: Path) -> None:
    """Kill at random moments and during the write of a checkpoint."""
    small = ["model=mlp", "+model.hidden=[8]", "eval.every_steps=130", f"cache.root={cache}"]
    crashes = Crashes(tmp_path, 7, 200, 20, small)
    while crashes.tally.kills < 3:
        crashes.kill_one_run(3)
    tally = crashes.tally
    assert tally.wrong == []
    assert (tally.kills, tally.resumes > 0) == (3, True)
