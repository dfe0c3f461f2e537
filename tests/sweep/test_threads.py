from __future__ import annotations

from typing import Any

import pytest

from pipeline.sweep.threads import THREADS, jobs_at_once, limit_threads


@pytest.mark.parametrize(
    ("launcher", "jobs"),
    [({}, 1), ({"n_jobs": None}, 1), ({"n_jobs": 3}, 3), ({"n_jobs": -1}, 8), ({"n_jobs": -9}, 1)],
)
def test_how_many_jobs_a_launcher_runs_at_once(
    launcher: dict[str, Any], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sweep.threads.processors", lambda: 8)
    assert jobs_at_once(launcher) == jobs


@pytest.mark.parametrize(("jobs", "threads"), [(1, None), (2, "4"), (3, "2"), (20, "1")])
def test_processors_are_shared_out(
    jobs: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.sweep.threads.processors", lambda: 8)
    environment: dict[str, str] = {}
    monkeypatch.setattr("pipeline.sweep.threads.os.environ", environment)
    limit_threads({"n_jobs": jobs})
    assert environment.get(THREADS) == threads
    environment[THREADS] = "5"
    limit_threads({"n_jobs": jobs})
    assert environment[THREADS] == "5"
