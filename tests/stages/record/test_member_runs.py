"""Tests of the jobs of a sweep and the members of an ensemble."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.core.errors import DataError
from pipeline.stages.record.member_runs import find_jobs, is_run_or_sweep, list_members


def make_run(folder: Path, status: str = "done") -> Path:
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text("name: a\n")
    (folder / "summary.json").write_text(json.dumps({"status": status}))
    return folder


def make_job(folder: Path, status: str = "done") -> Path:
    make_run(folder, status)
    (folder / "overrides.yaml").write_text("- seed=1\n")
    return folder


def test_jobs_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    jobs = [make_job(tmp_path / str(number)) for number in (10, 2, 1, 0)]
    (tmp_path / "best").mkdir()
    assert find_jobs(tmp_path) == jobs[::-1]


def test_members_are_runs_and_the_done_jobs_of_sweeps(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    # Hydra's folder of a run has a file of the name that jobs have.
    (run / ".hydra").mkdir()
    (run / ".hydra" / "overrides.yaml").write_text("[]\n")
    done = make_job(tmp_path / "sweep" / "0")
    make_job(tmp_path / "sweep" / "1", "failed")
    absent = tmp_path / "absent"
    assert list_members([tmp_path / "sweep", run, absent]) == [done, run, absent]


def test_sweep_without_a_done_job_is_refused(tmp_path: Path) -> None:
    make_job(tmp_path / "0", "failed")
    with pytest.raises(DataError, match="no job of this sweep is done"):
        list_members([tmp_path])


def test_other_folder_is_neither_run_nor_sweep(tmp_path: Path) -> None:
    assert not is_run_or_sweep(tmp_path)
    assert not is_run_or_sweep(tmp_path / "absent")
    make_job(tmp_path / "0")
    assert is_run_or_sweep(tmp_path)
    assert is_run_or_sweep(tmp_path / "0")
