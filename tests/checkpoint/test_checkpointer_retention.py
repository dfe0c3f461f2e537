"""Which checkpoints are kept for their age (K-01)."""

from __future__ import annotations

import json
import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.checkpoint.checkpoint_folder import MANIFEST
from pipeline.checkpoint.checkpointer import Retention
from pipeline.checkpoint.manifest import SAVED_AT


def saved_at(root: Path, minutes: list[float]) -> list[int]:
    """Make checkpoints 1, 2, ... saved at these minutes, and return their steps."""
    for step, minute in enumerate(minutes, start=1):
        manifest = root / str(step) / MANIFEST
        manifest.parent.mkdir(parents=True, exist_ok=True)
        manifest.write_text(json.dumps({SAVED_AT: 60.0 * minute}))
    return list(range(1, len(minutes) + 1))


def test_one_checkpoint_per_interval_is_retained_besides_newest(tmp_path: Path) -> None:
    steps = saved_at(tmp_path, [100, 103, 109, 110, 112, 121, 122, 123])
    assert Retention(2, minutes=10).list_removable(tmp_path, steps) == [2, 3, 5]


def test_clock_that_is_set_back_does_not_end_the_retention(tmp_path: Path) -> None:
    steps = saved_at(tmp_path, [1000, 1010, 100, 104, 110, 120, 121])
    assert Retention(1, minutes=10).list_removable(tmp_path, steps) == [4]


def test_ages_survive_a_folder_copy(tmp_path: Path) -> None:
    steps = saved_at(tmp_path / "run", [0, 10, 20, 21])
    shutil.copytree(tmp_path / "run", tmp_path / "copy", copy_function=shutil.copyfile)
    assert Retention(1, minutes=10).list_removable(tmp_path / "copy", steps) == []


def test_checkpoint_of_unknown_age_is_removable(tmp_path: Path) -> None:
    steps = saved_at(tmp_path, [0, 1, 2])
    (tmp_path / "1" / MANIFEST).unlink()
    assert Retention(1, minutes=10).list_removable(tmp_path, steps) == [1]


@pytest.mark.slow
@given(st.lists(st.floats(0, 30), min_size=1, max_size=12), st.integers(1, 40))
def test_incremental_removal_equals_removal_at_the_end(gaps: list[float], minutes: int) -> None:
    """Kept ones are far enough apart, and what is kept does not depend on earlier removals."""
    with tempfile.TemporaryDirectory() as folder:
        root, times = Path(folder), [sum(gaps[: n + 1]) for n in range(len(gaps))]
        steps = saved_at(root, times)
        rule = Retention(1, minutes=minutes)
        there: list[int] = []
        for step in steps:
            there.append(step)
            gone = set(rule.list_removable(root, there))
            there = [one for one in there if one not in gone]
        at_once = set(rule.list_removable(root, steps))
        assert there == [step for step in steps if step not in at_once]
        spaced = [times[step - 1] for step in there[:-1]]
        assert all(b - a >= minutes - 1e-6 for a, b in pairwise(spaced))
