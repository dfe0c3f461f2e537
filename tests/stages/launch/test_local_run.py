"""Restarts of a local run after the death of a process."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.host.signals import Signals
from pipeline.stages.launch import local
from pipeline.stages.launch.local import Failure, ProcessError
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.run_features import open_features
from pipeline.training.parallel.parallel_spec import LaunchSpec

Compose = Callable[..., Recipe]
LOCAL = ("parallel.mode=data", "launch=local", "launch.processes=4", "launch.restarts=2")
DEATH = Failure(1, "was ended by SIGKILL")
ERROR = Failure(1, "has failed: no memory", message="no memory")


@pytest.fixture
def attempt(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., list[Mapping[str, Any]]]:
    """Run a recipe whose attempts end by these failures; return the recipes of the processes."""

    def run(failures: list[Failure], *overrides: str, saves: bool = True) -> list[Any]:
        trees = []

        def run_locally(
            request: Mapping[str, Any], run_dir: Path, signals: Signals, launch: LaunchSpec
        ) -> Summary:
            trees.append(request["recipe"])
            (run_dir / "recipe.yaml").touch()
            monkeypatch.setattr(local, "list_saved_steps", lambda _: [1] if saves else [])
            if len(trees) <= len(failures):
                raise ProcessError("a process has ended", failures[len(trees) - 1])
            return Summary("name", "cpu", 0, (), str(run_dir))

        monkeypatch.setattr(local, "run_locally", run_locally)
        recipe = tiny(*LOCAL, *overrides)
        try:
            local.run_in_processes(recipe, RunOptions(tmp_path / "run"), open_features(recipe))
        except ProcessError:
            trees.append(None)
        return trees

    return run


@pytest.mark.medium
def test_death_restarts_from_the_run(attempt: Any, tmp_path: Path) -> None:
    first, second, third = attempt([DEATH, DEATH])
    assert first["train"]["resume"] is None
    assert second["train"]["resume"] == third["train"]["resume"] == str(tmp_path / "run")
    assert second["parallel"] == first["parallel"]


def test_number_of_restarts_is_limited(attempt: Any) -> None:
    trees = attempt([DEATH] * 3)
    assert (len(trees), trees[-1]) == (4, None)


def test_error_is_not_restarted(attempt: Any) -> None:
    trees = attempt([ERROR])
    assert (len(trees), trees[-1]) == (2, None)


@pytest.mark.medium
def test_restart_excludes_dead_processes(attempt: Any) -> None:
    trees = attempt([DEATH, DEATH], "launch.min_processes=1")
    assert [tree["launch"]["processes"] for tree in trees] == [4, 2, 1]
    assert [tree["parallel"]["devices"] for tree in trees] == [4, 2, 1]


@pytest.mark.medium
def test_restart_does_not_restore_the_initial_weights(attempt: Any, tmp_path: Path) -> None:
    (tmp_path / "before").mkdir()
    restore = f"checkpoint.restore={tmp_path / 'before'}"
    first, second = attempt([DEATH], restore)
    assert first["checkpoint"]["restore"] == str(tmp_path / "before")
    assert second["checkpoint"]["restore"] is None


@pytest.mark.medium
def test_run_with_restored_weights_and_no_checkpoint_is_not_restarted(
    attempt: Any, tmp_path: Path
) -> None:
    (tmp_path / "before").mkdir()
    trees = attempt([DEATH], f"checkpoint.restore={tmp_path / 'before'}", saves=False)
    assert (len(trees), trees[-1]) == (2, None)
