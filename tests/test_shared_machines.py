"""Runs whose disk, data, clock or neighbours misbehave, as they do on machines that are shared."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from pipeline import load_recipe
from pipeline.backends.loading import loader as loader_module
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.engine.callbacks.callback import Monitor, SinkReport
from pipeline.engine.monitors import metrics_log, tensorboard
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.record.summary import Summary
from pipeline.training.telemetry import Telemetry
from tests import outcome
from tests.conftest import MLP, TINY
from tests.engine.monitors.disk import files_end_at
from tests.engine.monitors.test_tensorboard import scalars
from tests.image_folders import save_images
from tests.whole_run import run

Compose = Callable[..., Recipe]
pytestmark = pytest.mark.mlp

LENGTH = ["train.steps=45", "train.sink_size=4", "checkpoint.every_steps=8"]
ALL_STEPS = list(range(1, 46))


class At(Monitor):
    """Does something at the end of the sink that ends at a step. As a pruner it ends nothing."""

    prune_reason = None

    def __init__(self, step: int, act: Callable[[], object]) -> None:
        self._step, self._act = step, act

    def on_sink(self, report: SinkReport) -> None:
        if report.step == self._step:
            self._act()


def no_space(*_: object, **__: object) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def read_only(*_: object, **__: object) -> Any:
    raise OSError(errno.EROFS, os.strerror(errno.EROFS))


@pytest.fixture(scope="module")
def unbroken(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nothing happens to; its programs are in the cache from here on."""
    folder = tmp_path_factory.mktemp("unbroken")
    run(load_recipe("lenet5_digits", [*TINY, *MLP, *LENGTH, f"cache.root={cache}"]), folder)
    return folder


def log_of(run_dir: Path) -> str:
    return (run_dir / "run.log").read_text()


def failure(run_dir: Path) -> str:
    summary = outcome.read_summary(run_dir)
    assert (summary["status"], summary["exit_status"]) == ("failed", 1)
    return summary["reason"]


# The log of steps and the checkpoints: a run can't do without them.


@pytest.mark.slow
def test_full_disk_ends_a_run_with_the_file_name(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """The system lets no file become as long as metrics.jsonl has to."""
    sizes = {file.name: file.stat().st_size for file in unbroken.iterdir() if file.is_file()}
    limit_bytes = sizes.pop("metrics.jsonl") - 200
    assert max(sizes.values()) < limit_bytes
    recipe = tiny(*LENGTH, "stages=[data,build,compile,train]")
    with pytest.raises(RunError) as caught, files_end_at(limit_bytes):
        run(recipe, tmp_path)
    assert str(caught.value) == f"{tmp_path / 'metrics.jsonl'}: can't be written: File too large"
    assert failure(tmp_path) == str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("refuse", "reason"),
    [(no_space, "No space left on device"), (read_only, "Read-only file system")],
)
def test_run_resumes_from_before_a_disk_failure(
    refuse: Any,
    reason: str,
    unbroken: Path,
    tiny: Compose,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lines = metrics_log.metrics_lines

    def refused(parts: Sequence[Telemetry], schedule: RunSchedule) -> str:
        return refuse() if parts[-1].steps.max() > 20 else lines(parts, schedule)

    with monkeypatch.context() as patched:
        patched.setattr(metrics_log, "metrics_lines", refused)
        with pytest.raises(RunError, match=rf"metrics\.jsonl: can't be written: {reason}"):
            run(tiny(*LENGTH), tmp_path)
    assert failure(tmp_path).endswith(reason)
    assert outcome.checkpoints(tmp_path) == [8, 16]
    run(tiny(*LENGTH, f"train.resume={tmp_path}"))
    assert (tmp_path / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    outcome.assert_equal_arrays(outcome.arrays(tmp_path), outcome.arrays(unbroken))


def vanish(run_dir: Path) -> None:
    # Renamed first: a file that is written meanwhile would keep the folder from being removed.
    shutil.rmtree(run_dir.rename(run_dir.with_name("vanished")))


def become_a_file(run_dir: Path) -> None:
    file = run_dir.with_name("file")
    file.write_text("in its place")
    # Two renames: a log that is written while a folder is removed would find nothing there.
    run_dir.rename(run_dir.with_name("moved"))
    file.rename(run_dir)


def lose_its_log(run_dir: Path) -> None:
    (run_dir / "metrics.jsonl").unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("happen", "reason"),
    [
        (vanish, "No such file or directory"),
        (become_a_file, "Not a directory"),
        (lose_its_log, "No such file or directory"),
    ],
)
def test_removed_run_directory_ends_its_run(
    happen: Callable[[Path], None], reason: str, unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """What is written to a file that was removed goes nowhere, and the system says nothing."""
    run_dir = tmp_path / "run"
    recipe = tiny("train.steps=45", "train.sink_size=4", "checkpoint.every_steps=20")
    with pytest.raises(RunError) as caught:
        run(recipe, run_dir, pruner=At(8, lambda: happen(run_dir)))
    place = re.escape(str(run_dir / "metrics.jsonl"))
    assert re.fullmatch(f"{place}: can't be written: ({reason})", str(caught.value))
    assert run_dir.is_dir() is (happen is lose_its_log)


@pytest.mark.slow
def test_unwritable_run_directory_is_reported(tiny: Compose, tmp_path: Path) -> None:
    with files_end_at(100), pytest.raises(RunError) as caught:
        run(tiny("stages=[data]"), tmp_path / "run")
    assert str(caught.value) == f"{tmp_path / 'run' / 'recipe.yaml'}: File too large"
    assert [file.name for file in (tmp_path / "run").iterdir()] == [".lock"]


@pytest.mark.slow
def test_unwritable_summary_is_reported(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder in its place, made while the run went on."""
    there = tmp_path / "summary.json"
    with pytest.raises(RunError) as caught:
        run(tiny(*LENGTH), tmp_path, pruner=At(8, there.mkdir))
    assert str(caught.value) == f"{there}: Is a directory"
    assert [line["step"] for line in outcome.metrics(tmp_path)] == ALL_STEPS


@pytest.mark.medium
def test_first_of_two_failures_is_reported(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RunError("the first")

    monkeypatch.setattr(Summary, "write", no_space)
    monkeypatch.setattr("pipeline.stages.run.load_data", fail)
    with pytest.raises(RunError, match=r"^the first$"):
        run(tiny("stages=[data]"), tmp_path)


# What a run can do without.


@pytest.mark.slow
@pytest.mark.parametrize("method", ["add_recipe", "flush"])
def test_failing_tensorboard_is_a_single_warning(
    method: str, unbroken: Path, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(tensorboard.TensorBoard, method, broken)
    run(tiny(*LENGTH, "monitor.tensorboard=true"), tmp_path)
    assert log_of(tmp_path).count("TensorBoard failed and has ended; training continues: ") == 1
    assert "ZeroDivisionError: division by zero" in log_of(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()


@pytest.mark.slow
def test_full_disk_for_tensorboard_does_not_end_the_run(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """Its events of these steps are longer than all that a run has to write."""
    limit_bytes = (unbroken / "metrics.jsonl").stat().st_size + 100
    overrides = ["stages=[data,build,compile,train]", "monitor.tensorboard=true"]
    with files_end_at(limit_bytes):
        assert run(tiny(*LENGTH, *overrides), tmp_path).status == "done"
    assert f"training continues: {tmp_path}: can't be written: File too" in log_of(tmp_path)
    assert [line["step"] for line in outcome.metrics(tmp_path)] == ALL_STEPS


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").is_char_device(), reason="no /dev/full")
def test_lost_console_does_not_end_the_run(cache: Path, tmp_path: Path) -> None:
    """As /dev/full is one, or the pipe to a program that has ended."""
    arguments = [*TINY, "stages=[data]", "hydra.run.dir=run"]
    command = [sys.executable, "-m", "pipeline", *arguments]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    with open("/dev/full", "w") as full:
        ended = subprocess.run(
            command, cwd=tmp_path, env=environment, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert (ended.returncode, ended.stderr) == (0, "")
    said = "the console can't be written (No space left on device); further lines are only in"
    assert log_of(tmp_path / "run").count(said) == 1
    assert log_of(tmp_path / "run").splitlines()[-1].endswith("done       all stages; run")


# Data that goes away.


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """48 training images and 8 for evaluation, in two classes."""
    root = tmp_path_factory.mktemp("images") / "root"
    return save_images(root, {"train": 24, "eval": 4})


@pytest.fixture
def reads(images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Compose:
    """A recipe that trains on the images, six steps an epoch, in windows of four steps."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    settings = [
        *("dataset=image_folder", f"dataset.root={images}", "dataset.image_size=[8,8]"),
        *("dataset.train.ops=[]", "dataset.eval.ops=[]", "model=mlp", "model.hidden=[4]"),
        *("train.batch_size=8", "train.steps=40", "train.sink_size=4", f"cache.root={cache}"),
        *("monitor.tensorboard=false", "monitor.sample_images=0", "checkpoint.every_steps=4"),
    ]
    return lambda *overrides: load_recipe("lenet5_digits", [*settings, *overrides])


@pytest.mark.slow
def test_resident_data_can_be_removed_during_training(
    reads: Compose, images: Path, tmp_path: Path
) -> None:
    hidden = images.with_name("hidden")
    stages = "stages=[data,build,compile,train]"
    try:
        run(
            reads("train.feed=resident", stages),
            tmp_path / "gone",
            pruner=At(4, lambda: images.rename(hidden)),
        )
    finally:
        hidden.rename(images)
    assert len(outcome.metrics(tmp_path / "gone")) == 40


@pytest.mark.slow
def test_streamed_data_removed_during_training_fail_the_run(
    reads: Compose, images: Path, tmp_path: Path
) -> None:
    """The file is named, and the run resumed when the data is back."""
    run(reads("train.feed=stream"), tmp_path / "kept")
    hidden, run_dir = images.with_name("hidden"), tmp_path / "gone"
    try:
        with pytest.raises(DataError, match=r"\.png: can't be read.*No such file or directory"):
            run(reads("train.feed=stream"), run_dir, pruner=At(8, lambda: images.rename(hidden)))
    finally:
        hidden.rename(images)
    summary = outcome.read_summary(run_dir)
    assert (summary["status"], summary["exit_status"]) == ("failed", 2)
    assert 8 in outcome.checkpoints(run_dir)
    run(reads("train.feed=stream", f"train.resume={run_dir}"))
    outcome.assert_same_run(run_dir, tmp_path / "kept")


# A clock that jumps.


@pytest.mark.slow
@pytest.mark.parametrize("jump_s", [86_400.0, -86_400.0], ids=["forward", "back"])
def test_clock_jump_does_not_change_the_run(
    jump_s: float, unbroken: Path, tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a day, after half of the steps, while a checkpoint is being written."""
    clock = time.time

    def jump() -> None:
        monkeypatch.setattr(time, "time", lambda: clock() + jump_s)

    recipe = tiny(*LENGTH, "monitor.tensorboard=true", "checkpoint.every_seconds=1000")
    assert 0 < run(recipe, tmp_path, pruner=At(20, jump)).time["total_s"] < 600
    assert (tmp_path / "metrics.jsonl").read_bytes() == (unbroken / "metrics.jsonl").read_bytes()
    assert outcome.checkpoints(tmp_path) == outcome.checkpoints(unbroken)
    assert list(scalars(tmp_path, "train/loss")) == ALL_STEPS


# Neighbours.

START_TOGETHER = """
import sys, time
time.strftime = lambda *_: "2026-01-01 12-00-00"
import pipeline.stages.run
from pipeline.__main__ import main
for arguments in (sys.argv[1:], [*sys.argv[1:], "hydra.run.dir=one"]):
    print("ready", flush=True)
    sys.stdin.readline()
    print("ended", main(arguments), flush=True)
"""


@pytest.mark.slow
def test_simultaneous_runs_never_share_a_directory(cache: Path, tmp_path: Path) -> None:
    """Real processes, whose clocks all say the same; then they are given one directory."""
    command = [sys.executable, "-c", START_TOGETHER, *TINY, "stages=[data]"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    processes = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, text=True, **pipes)
        for _ in range(2)
    ]

    def go_together() -> list[int]:
        for process in processes:
            while process.stdout.readline() != "ready\n":
                assert process.poll() is None
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        lines = [next(line for line in p.stdout if line.startswith("ended")) for p in processes]
        return [int(line.split()[1]) for line in lines]

    assert go_together() == [0, 0]
    made = sorted(path.name for path in (tmp_path / "outputs" / "2026-01-01").iterdir())
    name = "12-00-00_lenet5_digits"
    assert made == [name, f"{name}_1"]
    for path in (tmp_path / "outputs" / "2026-01-01").iterdir():
        assert outcome.read_summary(path)["status"] == "done"
        assert log_of(path).count("recipe ") == 1

    assert sorted(go_together()) == [0, 1]
    (told,) = "".join(process.communicate()[1] for process in processes).splitlines()
    assert told.startswith(("error: one: another process is", "error: one: holds a run already"))
    assert log_of(tmp_path / "one").count("recipe ") == 1
