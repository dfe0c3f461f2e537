"""A run without an inspection refuses what only an inspection can do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions

Compose = Callable[..., Recipe]


@pytest.mark.slow
def test_profile_is_refused_without_an_inspection(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny("profile.mode=on"), RunOptions(tmp_path / "run"))
    assert list(caught.value.problems) == [
        "profile.mode = on: must be off; this run has no profiler"
    ]


@pytest.mark.slow
def test_dumps_are_refused_without_an_inspection(tiny: Compose, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        run(tiny("dump.steps=3"), RunOptions(tmp_path / "run"))
    (problem,) = caught.value.problems
    assert problem == "dump.steps = 3: must be null; this run has no dumps"


@pytest.mark.slow
def test_run_starts_in_a_new_directory(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    first, second = (run(tiny("train.steps=2"), RunOptions()) for _ in range(2))
    assert first.run_dir != second.run_dir
    assert all(0 <= (summary.time["start_s"] or 0) < 1 for summary in (first, second))
