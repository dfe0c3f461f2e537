"""A task small enough for tests: LeNet-5 on the digits that ship with the package."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.tasks import TASKS, Task, TaskSpec, make_task


@pytest.fixture
def digits(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Task]:
    """Makes the task, with the settings given."""
    spec = TaskSpec("lenet5_digits", (), 96, (0.03,), (0.02,))
    monkeypatch.setitem(TASKS, "digits", spec)

    def make(**settings: object) -> Task:
        given = {"batch_size": None, "precision": "float32", "sink_size": 4, **settings}
        overrides = (f"cache.root={cache}", *given.pop("overrides", ()))
        return make_task("digits", tmp_path, root=None, threads=1, overrides=overrides, **given)

    return make
