"""The command `job`: its figures, what it refuses, and where it prints."""

from __future__ import annotations

import math
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from subprocess import CompletedProcess
from types import SimpleNamespace

import pytest
import yaml

from pipeline.cli import forecast, job
from pipeline.cli.commands.root import ROOT
from pipeline.core.errors import RecipeError, RunError, UsageError
from pipeline.core.files.paths import PROJECT
from pipeline.stages.launch.job_file import ENGINES, GIB, TrialRun
from tests.conftest import MLP, TINY

LIMITS = ("--minutes", "30", "--memory-gib", "4")
DATA = ("parallel.mode=data", "parallel.devices=4")
RECIPE = (*TINY, "train.steps=45")


def job_file(*words: str, capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """Return what the command prints on stdout and on stderr."""
    assert ROOT(["job", *words]) == 0
    out, err = capsys.readouterr()
    return out, err


@pytest.mark.parametrize("engine", ENGINES)
def test_measurement_is_skipped_if_time_and_memory_are_set(
    engine: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job, "run_trial", None)
    monkeypatch.setattr(forecast, "forecast_run", None)
    out, err = job_file("--to", engine, *LIMITS, *RECIPE, capsys=capsys)
    assert "train.resume=auto" in out
    assert "launch.end_seconds, 15 s; a stop wasn't measured" in out
    assert err == ""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Sequence[str]]:
    """Measurements of 2 ms a step and 10 s to start; the overrides of the runs that were asked for
    are in the list."""
    asked: list[Sequence[str]] = []

    def run(overrides: Sequence[str]) -> TrialRun:
        asked.append(overrides)
        return TrialRun(start_s=10.0, stop_s=70.5, memory_bytes=3 * GIB)

    monkeypatch.setattr(job, "run_trial", run)
    monkeypatch.setattr(forecast, "forecast_run", lambda *_: SimpleNamespace(step_ms=1000.0))
    return asked


@pytest.mark.medium
def test_job_limits_are_upper_bounds_of_measurements(
    measured: list[Sequence[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    out, err = job_file("--to", "slurm", *RECIPE, "checkpoint.every_steps=9", capsys=capsys)
    # 45 steps and 8 evaluations of 3 batches, 1,300.1 ms each; 6 checkpoints.
    minutes = math.ceil((10 + 6 * 70.5 + 1800 + 1.3001 * (45 + 8 * 3)) / 60)
    # The grace is a stop and the end of a dispatch, 71.5 s, in minutes.
    assert f"#SBATCH --time={minutes + 2}\n" in out
    assert "#SBATCH --signal=TERM@120\n" in out
    assert "1.25 times 3.00 GiB" in out
    assert len(measured) == 1
    assert "SBATCH" not in err
    assert "data" in err


@pytest.mark.medium
def test_time_limit_needs_no_forecast(
    measured: list[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast, "forecast_run", None)
    out, _ = job_file("--to", "slurm", "--minutes", "5", *RECIPE, capsys=capsys)
    assert "#SBATCH --time=7\n" in out
    assert "a stop with a checkpoint took 70.5 s here" in out


@pytest.mark.medium
def test_train_minutes_set_the_time_limit(
    measured: list[Sequence[str]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(forecast, "forecast_run", None)
    out, _ = job_file("--to", "slurm", *TINY, "train.minutes=5", capsys=capsys)
    assert "#SBATCH --time=37\n" in out  # half an hour to get machines, the grace
    with pytest.raises(RecipeError, match=r"train\.until = 18:00: must be train\.minutes; jobs"):
        ROOT(["job", "--to", "slurm", *LIMITS, *TINY, "train.until=18:00"])


@pytest.mark.medium
def test_step_without_forecast_requires_a_time_limit(
    measured: list[Sequence[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise RunError("train.mode = eager: must be graph")

    monkeypatch.setattr(forecast, "forecast_run", refuse)
    with pytest.raises(RunError, match="must be graph; --minutes N sets a time limit without"):
        ROOT(["job", "--to", "slurm", *RECIPE])


@pytest.mark.medium
def test_processes_share_the_devices(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--to", "jobset", *LIMITS, *RECIPE, *DATA)
    local = ["launch=local", "launch.processes=4", "launch.restarts=2"]
    by_option = job_file(*words, "--processes", "4", capsys=capsys)[0]
    by_recipe = job_file(*words, *local, capsys=capsys)[0]
    for text in (by_option, by_recipe):
        spec = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]["spec"]
        assert spec["completions"] == 4
    # Local processes are the engine's in the job.
    assert '"launch=auto"' in by_recipe
    assert "launch.restarts=2" not in by_recipe


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--processes", "2"], r"parallel.mode = none: must be data with 2 processes"),
        (["--processes", "3", *DATA], r"parallel.devices = 4: must be a multiple of 3 processes"),
        (["launch=mpi", *DATA], r"launch = mpi: must be auto or slurm with --to slurm"),
        (["train.resume=outputs/a"], r"train.resume = outputs/a: must be auto, by which a job"),
        (
            ["++monitor.lineage.password=hunter2"],
            r"monitor.lineage.password=\*\*\* would show a secret in the job file; refer to a",
        ),
        (["++monitor.lineage.note='a\nb'"], "must be printable, without line breaks"),
        (["device=ascend910", "--processes", "2", *DATA], "is emulated by one process"),
    ],
)
def test_recipe_unsupported_by_engine_is_refused(words: list[str], problem: str) -> None:
    with pytest.raises(RecipeError, match=problem) as caught:
        ROOT(["job", "--to", "slurm", *LIMITS, *RECIPE, *words])
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["--to", "slrum"], "--to slrum: must be one of slurm, jobset, trainjob, ray, skypilot"),
        ([], "--to is missing"),
        (["--to", "slurm", "--processes", "0"], "--processes 0: must be a whole number from 1"),
        (["--to", "slurm", "--gpu", "H100"], "--gpu H100: must be a kind of GPU, with slurm or"),
        (["--to", "skypilot", "device=gpu"], "--to skypilot: needs a kind of GPU, such as --gpu"),
        (["--to", "ray", "device=gpu", "--gpu", "H100"], "--gpu H100: must be a kind of GPU"),
    ],
)
def test_wrong_options_are_refused(words: list[str], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        ROOT(["job", *LIMITS, *words, *RECIPE])


@pytest.mark.medium
def test_gpus_are_counted_per_process(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("--processes", "2", *LIMITS, *RECIPE, *DATA, "device=gpu")
    assert "--gpus-per-task=2\n" in job_file("--to", "slurm", *words, capsys=capsys)[0]
    sky = yaml.safe_load(job_file("--to", "skypilot", "--gpu", "L4", *words, capsys=capsys)[0])
    assert sky["resources"]["accelerators"] == "L4:2"


@pytest.mark.slow
def test_local_files_get_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = (*LIMITS, *RECIPE, f"cache.root={tmp_path}")
    warning = f"cache.root = {tmp_path}: is a file of this machine; the job needs a copy there\n"
    for engine in ENGINES:
        out, err = job_file("--to", engine, *words, capsys=capsys)
        assert err.endswith(warning) == (engine != "slurm")
        assert "warning" not in out.replace(str(tmp_path), "")
    _, err = job_file("--to", "slurm", "--image", "docker://a/b", *words, capsys=capsys)
    assert err.endswith(warning)


def test_local_recipe_and_plugin_get_a_warning(
    forked: Callable[..., CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "mine.yaml").write_text("defaults: [lenet5_digits, _self_]\n")
    shutil.copy(PROJECT / "components.py", tmp_path)
    words = ["--plugin", "components.py", "job", "--to", "jobset", *LIMITS, "+recipe=mine"]
    printed = forked(words)
    assert printed.returncode == 0
    assert "+recipe = recipes/mine.yaml: is a file of this machine" in printed.stderr.replace(
        f"{tmp_path}/", ""
    )
    assert re.search(r"--plugin .*components\.py: is a file of this machine", printed.stderr)
    spec = yaml.safe_load(printed.stdout)["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    assert "--plugin" in container["command"]


@pytest.mark.slow
def test_job_file_is_printed_for_a_measured_recipe(
    forked: Callable[..., CompletedProcess[str]],
) -> None:
    printed = forked(
        ["job", "--to", "slurm", "+recipe=lenet5_digits", *TINY, *MLP, "train.steps=20000"]
    )
    assert printed.returncode == 0, printed.stderr
    assert printed.stdout.startswith("#!/bin/bash\n")
    time = re.search(
        r"^# time: (\d+):(\d\d):(\d\d): ([\d,]+) batches of at most (\S+) ms ",
        printed.stdout,
        re.MULTILINE,
    )
    assert time is not None
    hours, minutes, seconds, batches = (int(word.replace(",", "")) for word in time.groups()[:4])
    others_s = 3600 * hours + 60 * minutes + seconds - batches * float(time[5]) / 1e3
    # The start, three checkpoints at most, and the rounding of the milliseconds.
    assert job.CLUSTER_START_S < others_s < job.CLUSTER_START_S + 120
    assert re.search(r"^# memory: 1.25 times 0\.\d\d GiB", printed.stdout, re.MULTILINE)
    assert re.search(r"^# grace: a stop with a checkpoint took", printed.stdout, re.MULTILINE)
    words = shlex.split(printed.stdout.partition("srun")[2].partition("status=")[0])
    assert words[-1] == "train.resume=auto"
