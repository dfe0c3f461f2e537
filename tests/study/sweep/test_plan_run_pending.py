from __future__ import annotations

import json
import multiprocessing
import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from hydra.core.utils import JobReturn, JobStatus

from pipeline.core.errors import RunError
from pipeline.study.sweep.directory import claim_job, is_held
from pipeline.study.sweep.plan import PlannedJob, run_all


def planned(sweep_dir: Path, count: int) -> list[PlannedJob]:
    jobs = [
        PlannedJob(n, sweep_dir / str(n), (f"seed={n}",), {"seed": n}, None) for n in range(count)
    ]
    for job in jobs:
        job.folder.mkdir()
    return jobs


def finish(job: PlannedJob, status: str = "done") -> JobReturn:
    (job.folder / "summary.json").write_text(json.dumps({"status": status}))
    return JobReturn(status=JobStatus.COMPLETED)


def test_jobs_are_launched_until_all_are_finished(tmp_path: Path) -> None:
    """The launcher loses what it has not done by its second job."""
    started: list[list[int]] = []

    def launch(jobs: Sequence[PlannedJob]) -> list[JobReturn]:
        started.append([job.number for job in jobs])
        finish(jobs[0])
        raise RuntimeError("a worker was killed")

    run_all(planned(tmp_path, 3), {}, launch)
    assert started == [[0, 1, 2], [1, 2], [2]]


def test_launcher_without_progress_is_abandoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = JobReturn(status=JobStatus.FAILED)
    failed.return_value = OSError("no space left")
    with pytest.raises(RunError) as caught:
        run_all(planned(tmp_path, 2), {}, lambda jobs: [failed])
    assert str(caught.value) == (
        "jobs 0, 1: started 3 times, and ended each time with OSError: no space left"
    )
    assert capsys.readouterr().err.count("a launch ended with OSError: no space left") == 3


def test_permanent_error_ends_the_sweep_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failed = JobReturn(status=JobStatus.FAILED, overrides=["seed=0"])
    failed.return_value = RunError("sweep/0/summary.json: couldn't be written, so the sweep ends")
    started: list[int] = []

    def launch(jobs: Sequence[PlannedJob]) -> list[JobReturn]:
        started.append(len(jobs))
        return [failed]

    with pytest.raises(RunError, match=r"^sweep/0/summary.json: couldn't be written"):
        run_all(planned(tmp_path, 2), {}, launch)
    assert started == [2]
    assert capsys.readouterr() == ("", "")


def test_failure_in_another_process_is_not_retried(tmp_path: Path) -> None:
    """A job that had failed before the command started is retried, once."""
    old, new = planned(tmp_path, 2)
    for job in (old, new):
        finish(job, "failed")
    failures = {"0": (old.folder / "summary.json").stat().st_mtime_ns}
    started: list[int] = []

    def launch(jobs: Sequence[PlannedJob]) -> list[JobReturn]:
        started.extend(job.number for job in jobs)
        return [finish(job, "failed") for job in jobs]

    run_all([old, new], failures, launch)
    assert started == [0]


def hold(folder: Path, ready: multiprocessing.Event) -> None:  # type: ignore[valid-type]
    with claim_job(folder) as free:
        assert free
        ready.set()
        signal.pause()


@pytest.mark.slow
def test_job_of_a_killed_process_is_taken_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """While it lives it is waited for; the kernel's lock shows that it died."""
    (job,) = planned(tmp_path, 1)
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    other = spawn.Process(target=hold, args=(job.folder, ready))
    other.start()
    assert ready.wait(30)
    assert is_held(job.folder)
    spawn_killer = spawn.Process(target=os.kill, args=(other.pid, signal.SIGKILL))
    spawn_killer.start()
    run_all([job], {}, lambda jobs: [finish(one) for one in jobs])
    other.join()
    spawn_killer.join()
    assert other.exitcode == -signal.SIGKILL
    assert "waiting for other processes, which run jobs 0" in capsys.readouterr().out
