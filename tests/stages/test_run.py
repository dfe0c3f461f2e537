"""Runs that are resumed in the directory of a finished one: what they leave of it."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RunError
from pipeline.core.host.signals import Signals
from pipeline.engine.callbacks.callback import Callback, RunControl, SinkReport
from pipeline.stages import run as run_module
from pipeline.stages.record import trained_run
from pipeline.stages.runner import programs
from tests import outcome
from tests.conftest import TINY
from tests.whole_run import run

Patch = pytest.MonkeyPatch

pytestmark = pytest.mark.slow

STEPS = 24
DATA = ["dataset=numpy", *(line for line in TINY if not line.lstrip("+").startswith("dataset."))]


def write_data(file: Path, seed: int = 1) -> Path:
    """Write images of four classes."""
    draw = np.random.default_rng(seed)
    splits = {}
    for name, size in (("train", 96), ("test", 40)):
        splits[f"x_{name}"] = draw.integers(0, 255, (size, 32, 32, 1), np.uint8)
        splits[f"y_{name}"] = np.arange(size) % 4
    np.savez(file, **splits)
    return file


@pytest.fixture(scope="module")
def compose(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Recipe]:
    """Compose the recipe of the finished run with further overrides."""
    root = write_data(tmp_path_factory.mktemp("data") / "data.npz")

    def make(*overrides: str) -> Recipe:
        common = [f"dataset.root={root}", "checkpoint.every_steps=8", f"cache.root={cache}"]
        return load_recipe("lenet5_digits", [*DATA, *common, *overrides])

    return make


@pytest.fixture(scope="module")
def finished(compose: Callable[..., Recipe], tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    run(compose(f"train.steps={STEPS}"), run_dir)
    return run_dir


@pytest.fixture
def done(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "run"))


def files_of(folder: Path) -> dict[str, bytes]:
    """All files by path."""
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def fail(*_: Any, **__: Any) -> Any:
    raise RunError("it can't be done")


def interrupt(*_: Any, **__: Any) -> Any:
    signal.raise_signal(signal.SIGTERM)


def damage_checkpoints(run_dir: Path, patch: Patch) -> None:
    for step in outcome.checkpoints(run_dir):
        (make_checkpoint_path(run_dir / "checkpoints", step) / "host" / "metadata").write_bytes(
            b"{}"
        )


def damage_log(run_dir: Path, patch: Patch) -> None:
    """Without the marks of a checkpoint nothing says what a log has lost."""
    restore = trained_run.restore_state

    def without_marks(*args: Any) -> Any:
        state, host = restore(*args)
        return state, replace(host, logs={})

    patch.setattr(trained_run, "restore_state", without_marks)
    lines = (run_dir / "metrics.jsonl").read_bytes() + b'{"step": 30}\n'
    (run_dir / "metrics.jsonl").write_bytes(lines)
    (run_dir / "evals.jsonl").write_text("not a step\n")


REFUSED: dict[str, tuple[list[str], Callable[[Path, Patch], object], str]] = {
    "fewer steps": (["train.steps=16"], lambda *_: None, "steps in all; .* has done 24 already"),
    "another recipe": (["train.optimizer.lr=0.5"], lambda *_: None, "train.optimizer.lr = 0.5"),
    "a mistyped root": (["dataset.root=/nowhere.npz"], lambda *_: None, "/nowhere.npz"),
    "other data": ([], lambda run_dir, _: None, "the data have changed since the run was trained"),
    "damaged checkpoints": ([], damage_checkpoints, "none of its checkpoints can be read"),
    "a damaged log": ([], damage_log, "evals.jsonl, line 1: isn't a step of a run"),
    "no lowerings": (
        [],
        lambda run_dir, _: (run_dir / "lowerings.json").write_text("{"),
        "must be the lowerings of a run",
    ),
    "a dump of no layer": (["dump.steps=30", "dump.layers=[nowhere]"], lambda *_: None, "nowhere"),
    "a profile of too few steps": (["profile.mode=only"], lambda *_: None, "profile"),
    "no memory": (
        [],
        lambda _, patch: patch.setattr(
            "pipeline.core.host.memory.read_available_bytes", lambda: 300_000
        ),
        "the weights and the optimizer of lenet5 would take .* are available here",
    ),
    "a program that can't be compiled": (
        [],
        lambda _, patch: patch.setattr(programs, "compile_programs", fail),
        "it can't be done",
    ),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_resume_leaves_the_finished_run_unchanged(
    reason: str, done: Path, compose: Callable[..., Recipe], monkeypatch: Patch
) -> None:
    overrides, prepare, message = REFUSED[reason]
    prepare(done, monkeypatch)
    if reason == "other data":
        overrides = [f"dataset.root={write_data(done.parent / 'other.npz', seed=2)}"]
    before = files_of(done)
    recipe = compose("train.steps=48", f"train.resume={done}", *overrides)
    with pytest.raises(PipelineError, match=message):
        run(recipe)
    assert files_of(done) == before


def test_invalid_callback_leaves_the_finished_run_unchanged(
    done: Path, compose: Callable[..., Recipe]
) -> None:
    before = files_of(done)
    callbacks: Any = [object()]
    with pytest.raises(PipelineError, match="callbacks: "):
        run(compose("train.steps=48", f"train.resume={done}"), callbacks=callbacks)
    assert files_of(done) == before


def test_signal_before_a_new_step_leaves_the_finished_run_unchanged(
    done: Path, compose: Callable[..., Recipe], monkeypatch: Patch
) -> None:
    before = files_of(done)
    monkeypatch.setattr(programs, "compile_programs", interrupt)
    summary = run(compose("train.steps=48", f"train.resume={done}"))
    assert (summary.status, summary.exit_status) == ("stopped", 75)
    assert files_of(done) == before


def test_run_is_done_until_its_first_new_step(
    done: Path, compose: Callable[..., Recipe], monkeypatch: Patch
) -> None:
    """What a process finds there that is killed meanwhile."""
    seen: dict[str, dict[str, bytes]] = {}
    open_training = run_module.open_training

    @contextmanager
    def watch_first_step(*args: Any) -> Iterator[Any]:
        with open_training(*args) as training:
            executable = training[0].executable
            dispatch = executable.run

            def run_steps(*args: Any) -> Any:
                seen.setdefault("before", files_of(done))
                seen["later"] = files_of(done)
                return dispatch(*args)

            monkeypatch.setattr(executable, "run", run_steps)
            yield training

    before = files_of(done)
    monkeypatch.setattr(run_module, "open_training", watch_first_step)
    run(compose("train.steps=48", "train.sink_size=8", f"train.resume={done}"))
    for name in ("summary.json", "recipe.yaml", "metrics.jsonl", "evals.jsonl"):
        assert seen["before"][name] == before[name]
    assert "summary.json" not in seen["later"]
    assert b"steps: 48" in seen["later"]["recipe.yaml"]
    assert outcome.read_summary(done)["steps"] == 48


def test_resume_without_a_new_step_leaves_the_metrics_unchanged(
    done: Path, compose: Callable[..., Recipe]
) -> None:
    before = outcome.read_summary(done)
    stages = "stages=[data,build,compile,train,checkpoint]"
    run(compose(f"train.steps={STEPS}", f"train.resume={done}", stages))
    after = outcome.read_summary(done)
    for name in ("status", "steps", "epochs", "sinks", "metrics"):
        assert after[name] == before[name]


class Logging(Callback):
    """Logs a scalar at the end of each sink, and does something at one of them."""

    def __init__(self, step: int = 0, act: Callable[[], Any] = fail) -> None:
        self.step, self.act = step, act

    def on_sink(self, run: RunControl, report: SinkReport) -> None:
        """Log, then act."""
        run.log("sink", report.step)
        if report.step == self.step:
            self.act()


class KilledError(BaseException):
    """The process is gone."""


def kill() -> None:
    """End the process, as far as one test can."""
    raise KilledError


def test_scalar_of_an_interrupted_evaluation_is_logged_once(
    compose: Callable[..., Recipe], tmp_path: Path
) -> None:
    """Also where the process that goes on is killed before it saves anything new."""
    length = f"train.steps={STEPS}", "train.sink_size=8", "checkpoint.every_steps=12"
    events = "eval.every_steps=8", "eval.every_epochs=null"
    recipe = compose(*length, *events)
    run(recipe, tmp_path / "whole", callbacks=[Logging()])

    signals = Signals()
    stop = Logging(8, lambda: setattr(signals, "stop", "SIGTERM received"))
    run_dir = tmp_path / "run"
    assert run(recipe, run_dir, callbacks=[stop], signals=signals).status == "stopped"
    assert outcome.checkpoints(run_dir) == [8]
    said = [line[9:] for line in (run_dir / "run.log").read_text().splitlines()]
    saved = said.index("saved      step 8; the run goes on from there with")
    assert said[saved + 1].startswith(f"resume     train.resume={run_dir}")
    resumed = compose(*length, *events, f"train.resume={run_dir}", "checkpoint.every_steps=null")
    with pytest.raises(KilledError):
        run(resumed, callbacks=[Logging(16, kill)])
    assert outcome.checkpoints(run_dir) == [8]
    run(resumed, callbacks=[Logging()])
    for log in ("metrics.jsonl", "evals.jsonl", "scalars.jsonl"):
        assert (run_dir / log).read_bytes() == (tmp_path / "whole" / log).read_bytes(), log


def test_disk_without_room_for_a_checkpoint_ends_the_run_before_its_first_step(
    compose: Callable[..., Recipe], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = SimpleNamespace(total=10**9, used=10**9 - 1000, free=1000)
    monkeypatch.setattr("pipeline.checkpoint.checkpointer.shutil.disk_usage", lambda _: usage)
    with pytest.raises(RunError, match=r"a checkpoint takes .*, 1\.0 kB are free; make room"):
        run(compose(f"train.steps={STEPS}"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").read_text()
