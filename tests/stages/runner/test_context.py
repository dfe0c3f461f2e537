"""Options of a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions

Compose = Callable[..., Recipe]


@pytest.mark.slow
def test_run_starts_in_a_new_directory(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (run(tiny("train.steps=2"), RunOptions()) for _ in range(2))
    assert first.run_dir != second.run_dir
    assert all(0 <= (summary.time["start_s"] or 0) < 1 for summary in (first, second))
