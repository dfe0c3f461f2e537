from __future__ import annotations

from typing import Any

import pytest

from pipeline.core.host.cuda import MEMORY_SHARE
from pipeline.study.sweep.jobs import (
    THREADS,
    compute_shares,
    count_jobs_at_once,
    share_processors,
)


@pytest.mark.parametrize(
    ("launcher", "jobs"),
    [({}, 1), ({"n_jobs": None}, 1), ({"n_jobs": 3}, 3), ({"n_jobs": -1}, 8), ({"n_jobs": -9}, 1)],
)
def test_jobs_at_once_of_a_launcher(
    launcher: dict[str, Any], jobs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.study.sweep.jobs.count_processors", lambda: 8)
    assert count_jobs_at_once(launcher) == jobs


@pytest.mark.parametrize(("jobs", "threads"), [(1, None), (2, "4"), (3, "2"), (20, "1")])
def test_processors_are_divided_among_jobs(
    jobs: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.study.sweep.jobs.count_processors", lambda: 8)
    environment: dict[str, str] = {}
    monkeypatch.setattr("pipeline.study.sweep.jobs.os.environ", environment)
    environment.update(compute_shares({"n_jobs": jobs}))
    assert environment.get(THREADS) == threads
    environment[THREADS] = "5"
    environment.update(compute_shares({"n_jobs": jobs}))
    assert environment[THREADS] == "5"


SUBMITIT = {"_target_": "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher"}
RAY = {"_target_": "hydra_plugins.hydra_ray_launcher.ray_launcher.RayLauncher"}


@pytest.mark.parametrize(
    ("launcher", "given", "at_once"),
    [
        (SUBMITIT, 5, 5),
        (RAY, 20, 8),
        ({**RAY, "ray": {"init": {"num_cpus": 2}}}, 20, 2),
        ({**RAY, "ray": {"init": {"num_cpus": 6}, "remote": {"num_cpus": 3}}}, 20, 2),
        ({**RAY, "ray": {"init": {"num_cpus": 6}}}, 3, 3),
        ({**RAY, "ray": {"init": {"address": "auto"}}}, 20, 1),
        ({"_target_": SUBMITIT["_target_"].replace("Local", "Slurm")}, 20, 1),
        ({"n_jobs": 2}, 20, 2),
        ({}, 20, 1),
    ],
)
def test_separate_processes_share_the_processors(
    launcher: dict[str, Any], given: int, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.study.sweep.jobs.count_processors", lambda: 8)
    environment: dict[str, str] = {}
    monkeypatch.setattr("pipeline.study.sweep.jobs.os.environ", environment)
    assert count_jobs_at_once(launcher, given) == at_once
    with share_processors(launcher, given):
        assert environment.get(THREADS) == (str(8 // at_once) if at_once > 1 else None)
        environment.update(compute_shares(launcher))
    environment.clear()
    with share_processors(launcher, given):
        pass
    assert environment == {}
    environment[THREADS] = "5"
    with share_processors(launcher, given):
        share = {MEMORY_SHARE: f"{0.75 / at_once:.3f}"} if at_once > 1 else {}
        assert environment == {THREADS: "5", **share}
        environment |= dict.fromkeys(share, "0.2")
        environment.update(compute_shares({**launcher, "n_jobs": at_once}))
        assert environment.get(MEMORY_SHARE) == ("0.2" if share else None)
    assert environment == {THREADS: "5"}
