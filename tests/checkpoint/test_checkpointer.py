from __future__ import annotations

import errno
import itertools
import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import orbax.checkpoint as ocp
import pytest

from pipeline.backends.xla import XlaExecutable
from pipeline.checkpoint.checkpoint_folder import FOLDER, make_checkpoint_path, make_draft_path
from pipeline.checkpoint.checkpointer import Checkpoints, Retention, describe_disk_error
from pipeline.checkpoint.restore import read_checkpoint
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.stages.record.trained_run import restore_state, restore_weights
from pipeline.training.state import TrainState
from tests import outcome
from tests.conftest import MLP, compose_tiny
from tests.engine.monitors.disk import files_end_at
from tests.whole_run import run

Compose = Callable[..., Recipe]

COURSE = [*MLP, "train.sink_size=7", "eval.every_steps=10", "checkpoint.every_steps=5"]
EVAL_ONLY = "stages=[data,build,compile,eval]"


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """45 steps in one go, every checkpoint kept."""
    run_dir = tmp_path_factory.mktemp("unbroken")
    run(compose_tiny(cache, *COURSE, "checkpoint.keep=99"), run_dir)
    return run_dir


def broken(unbroken: Path, run_dir: Path, saved: int) -> Path:
    """The run as if killed some steps after the checkpoint of step `saved`, while writing."""
    shutil.copytree(unbroken, run_dir)
    (run_dir / "summary.json").unlink()
    for step in outcome.checkpoints(run_dir):
        if step > saved:
            shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step))
    lines = (unbroken / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics.jsonl").write_text("".join(lines[: saved + 3]) + lines[saved + 3][:20])
    return run_dir


def assert_same_logs(one: Path, other: Path) -> None:
    for name in ("metrics.jsonl", "evals.jsonl"):
        assert (one / name).read_bytes() == (other / name).read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("step", [5, 10, 40])
def test_resumed_run_equals_uninterrupted_run(
    step: int, unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """K-05: inside sinks and epochs, at evaluations; bit for bit."""
    run_dir = broken(unbroken, tmp_path / "run", step)
    summary = run(tiny(*COURSE, f"train.resume={run_dir}", "checkpoint.keep=99"))
    assert_same_logs(run_dir, unbroken)
    outcome.assert_equal_arrays(outcome.arrays(run_dir), outcome.arrays(unbroken))
    assert (summary.status, summary.steps, summary.epochs, summary.sinks) == ("done", 45, 7.5, 7)
    assert summary.resumed_from == {"run": str(run_dir), "step": step}


@pytest.mark.slow
def test_resume_without_checkpoint_starts_over(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = broken(unbroken, tmp_path / "run", 0)
    summary = run(tiny(*COURSE, f"train.resume={run_dir}"))
    assert summary.resumed_from == {"run": str(run_dir), "step": 0}
    assert_same_logs(run_dir, unbroken)


@pytest.mark.slow
@pytest.mark.mlp
def test_resumed_run_accepts_another_sink_size(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = broken(unbroken, tmp_path / "run", 10)
    events = ["eval.every_steps=10", "checkpoint.every_steps=5"]
    run(tiny(*events, "train.sink=false", f"train.resume={run_dir}"))
    assert outcome.metrics(run_dir) == outcome.metrics(unbroken)
    outcome.assert_equal_arrays(outcome.arrays(run_dir), outcome.arrays(unbroken))


@pytest.mark.slow
def test_done_run_can_be_continued(unbroken: Path, tiny: Compose, tmp_path: Path) -> None:
    """Stopped inside a sink and between checkpoints: the end is saved, whatever the period."""
    run(tiny(*COURSE, "train.steps=18"), tmp_path)
    summary = run(tiny(*COURSE, f"train.resume={tmp_path}"))
    assert summary.resumed_from == {"run": str(tmp_path), "step": 18}
    assert outcome.metrics(tmp_path) == outcome.metrics(unbroken)
    outcome.assert_equal_arrays(outcome.arrays(tmp_path), outcome.arrays(unbroken))


@pytest.mark.slow
@pytest.mark.mlp
def test_final_evaluation_is_logged_once(tiny: Compose, tmp_path: Path) -> None:
    """A run that was killed after it makes it again."""
    every = "eval.every_steps=15"
    run(tiny(every), tmp_path)
    before = (tmp_path / "evals.jsonl").read_bytes()
    (tmp_path / "summary.json").unlink()
    run(tiny(every, f"train.resume={tmp_path}"))
    assert (tmp_path / "evals.jsonl").read_bytes() == before
    assert [line["step"] for line in outcome.read_lines(tmp_path / "evals.jsonl")] == [15, 30, 45]


@pytest.mark.slow
@pytest.mark.mlp
def test_newest_checkpoints_are_retained(tiny: Compose, tmp_path: Path) -> None:
    """K-01."""
    run(tiny("checkpoint.every_steps=10", "checkpoint.keep=2"), tmp_path)
    assert outcome.checkpoints(tmp_path) == [40, 45]


@pytest.mark.slow
@pytest.mark.parametrize(("metric", "best"), [("loss", min), ("accuracy", max)])
def test_best_checkpoint_is_retained_besides_the_newest(
    metric: str, best: Callable[..., float], tmp_path: Path
) -> None:
    """E-02; saved by hand, so that the best is neither the first nor the last."""
    values = {1: 0.5, 2: 0.25, 3: 0.75, 4: 0.5, 5: 0.4}
    with Checkpoints(tmp_path, kept(1, metric)) as checkpoints:
        for step, value in values.items():
            checkpoints.save(step, state_of(step), {}, {metric: value})
    wanted = next(step for step in values if values[step] == best(values.values()))
    assert outcome.checkpoints(tmp_path) == [wanted, 5]


@pytest.mark.medium
def test_best_checkpoint_survives_checkpoints_without_metrics(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(2, "loss")) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {"loss": 0.5})
        for step in (2, 3, 4):
            checkpoints.save(step, state_of(step), {}, None)
    assert outcome.checkpoints(tmp_path) == [1, 3, 4]


@pytest.mark.medium
def test_best_checkpoint_is_remembered_across_resume(tmp_path: Path) -> None:
    for first, value in ((1, 0.25), (3, 0.5)):
        with Checkpoints(tmp_path, kept(1, "loss")) as checkpoints:
            checkpoints.save(first, state_of(first), {}, {"loss": value})
            checkpoints.save(first + 1, state_of(first + 1), {}, {"loss": 0.75})
    assert outcome.checkpoints(tmp_path) == [1, 4]


def kept(newest: int, best: str | None) -> Retention:
    return Retention(newest, best)


def state_of(step: int, **params: np.ndarray) -> TrainState:
    weights = params or {"kernel": np.full((2, 3), step, np.float32)}
    statistics = {"batch_stats": {"mean": np.ones(2, np.float32)}}
    return TrainState(np.int32(step), {"dense": weights}, statistics, (), {"scale": np.float32(8)})


def test_checkpoint_and_logs_are_synced_before_older_one_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a power cut there would be neither: the system writes names before contents."""
    calls: list[str] = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def name_of(path: Any) -> str:
        return Path(path).relative_to(tmp_path).as_posix()

    def record_sync(descriptor: int) -> None:
        calls.append(f"sync {name_of(os.readlink(f'/proc/self/fd/{descriptor}'))}")
        fsync(descriptor)

    def record_rename(real: Callable[..., None]) -> Callable[..., None]:
        def renamed(source: Any, target: Any, **named: Any) -> None:
            if Path(source).parent == tmp_path / "checkpoints":
                calls.append(f"rename {name_of(source)} to {name_of(target)}")
            real(source, target, **named)

        return renamed

    (tmp_path / "metrics.jsonl").touch()
    with Checkpoints(tmp_path, kept(1, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, None)
        checkpoints.finish()
        monkeypatch.setattr(os, "fsync", record_sync)
        monkeypatch.setattr(os, "replace", record_rename(replace))
        monkeypatch.setattr(os, "rename", record_rename(rename))
        checkpoints.save(2, state_of(2), {"logs": {"metrics.jsonl": {}}}, None)
        checkpoints.finish()
    first, second = (make_checkpoint_path(Path(FOLDER), step) for step in (1, 2))
    draft, removed = make_draft_path(second), make_draft_path(first)
    named = calls.index(f"rename {draft} to {second}")
    before = set(calls[:named])
    assert before >= {
        f"sync {draft}/{file.relative_to(tmp_path / second).as_posix()}"
        for file in (tmp_path / second).rglob("*")
    }
    assert before >= {"sync metrics.jsonl", f"sync {draft}"}
    assert calls[named + 1 :] == [
        "sync checkpoints",
        f"rename {first} to {removed}",
        "sync checkpoints",
    ]


def test_step_is_saved_once(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {"round": 1}, None)
        checkpoints.save(1, state_of(9), {"round": 2}, None)
    assert outcome.arrays(tmp_path)["step"] == 1


def test_host_state_that_could_not_be_read_is_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.checkpoint.checkpointer.MOST_JSON_BYTES", 100)
    large = {"callbacks": {"states": {"Actor-1": "x" * 100}}}
    problem = "can't save step 2: host/metadata would have 142 bytes, more than 100"
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, None)
    checkpoints = Checkpoints(tmp_path, kept(5, None))
    with pytest.raises(RunError, match=problem), checkpoints:
        checkpoints.save(2, state_of(2), large, None)
    assert outcome.checkpoints(tmp_path) == [1]


def test_arrays_and_host_state_round_trip(tmp_path: Path) -> None:
    """K-02: the arrays with their dtypes, and what the host knows."""
    state, host = state_of(7), {"early_stop": {"best": 0.5, "waited": 1}}
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(7, state, host, None)
    restored, restored_host = restore_state(tmp_path, state_of(0), {}, print) or (None, None)
    assert restored is not None
    assert restored_host is not None
    assert asdict(restored_host.early_stop) == host["early_stop"]
    assert int(restored.step) == 7
    assert restored.step.dtype == np.int32
    assert restored.features["scale"] == 8.0
    assert np.array_equal(restored.params["dense"]["kernel"], state.params["dense"]["kernel"])
    assert restored.params["dense"]["kernel"].dtype == np.float32


def test_saved_state_is_a_snapshot(tmp_path: Path) -> None:
    """The device is given the buffers again while they are still being written."""
    state = state_of(1)
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state, {}, None)
        state.params["dense"]["kernel"][:] = -1
    assert outcome.arrays(tmp_path)["params/dense/kernel"].tolist() == [[1, 1, 1], [1, 1, 1]]


def test_incomplete_checkpoint_is_ignored(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, None)
    (make_checkpoint_path(tmp_path / "checkpoints", 2)).mkdir()
    make_draft_path(make_checkpoint_path(tmp_path / FOLDER, 3)).mkdir()
    restored, _ = restore_state(tmp_path, state_of(0), {}, print) or (None, None)
    assert restored is not None
    assert int(restored.step) == 1


def test_restore_without_checkpoints_returns_none(tmp_path: Path) -> None:
    assert restore_state(tmp_path, state_of(0), {}, print) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("where", "step"),
    [("", 40), ("checkpoints", 40), (str(make_checkpoint_path(Path(FOLDER), 10)), 10)],
)
@pytest.mark.mlp
def test_evaluation_of_checkpoint_matches_run_metrics(
    where: str, step: int, unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """E-04: by its run, by the folder of checkpoints, by itself."""
    source = broken(unbroken, tmp_path / "source", 40) / where
    summary = run(tiny(EVAL_ONLY, f"checkpoint.restore={source}"), tmp_path / "run")
    (own,) = [e for e in outcome.read_lines(unbroken / "evals.jsonl") if e["step"] == step]
    assert summary.metrics == {name: own[name] for name in own if name != "step"}
    assert summary.status == "done"
    assert f"restore    weights of step {step} from {source}" in run_log(tmp_path / "run")


def run_log(run_dir: Path) -> list[str]:
    """Without the time of day."""
    return [line.partition(" ")[2] for line in (run_dir / "run.log").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.mlp
def test_restored_weights_start_a_new_run(unbroken: Path, tiny: Compose, tmp_path: Path) -> None:
    """K-05, transfer: weights only; the steps, the momentum and the data start again."""
    stages = "stages=[data,build,compile,train,checkpoint]"
    restore = f"checkpoint.restore={unbroken}"
    run(tiny(stages, restore, "train.optimizer.lr=1e-30"), tmp_path)
    assert [line["step"] for line in outcome.metrics(tmp_path)] == list(range(1, 46))
    started, finished = outcome.arrays(unbroken, 45), outcome.arrays(tmp_path, 45)
    weights = [path for path in started if path.startswith("params/")]
    assert len(weights) == 4
    for path in weights:
        np.testing.assert_allclose(finished[path], started[path], rtol=0, atol=1e-20)
    assert finished["step"] == 45


def test_restore_takes_parameters_and_statistics_only(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(4, state_of(4), {}, None)
    fresh = state_of(0)
    restored, saved = restore_weights(tmp_path, fresh, {}, print)
    assert (saved.step, int(restored.step), restored.features) == (4, 0, fresh.features)
    assert (restored.params["dense"]["kernel"] == 4).all()


def test_checkpoint_of_another_network_is_refused(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(4, state_of(4), {}, None)
    other = state_of(0, kernel=np.zeros((2, 4), np.float16), bias=np.zeros(4))
    with pytest.raises(DataError) as caught:
        restore_weights(tmp_path, other, {}, print)
    assert str(caught.value) == (
        f"{tmp_path / 'checkpoints' / '4'}: of another recipe: params/dense/bias is missing; "
        "params/dense/kernel is float32[2, 3], this network needs float16[2, 4]"
    )


def test_only_the_first_differences_are_listed(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(4, state_of(4), {}, None)
    other = state_of(0, **{f"layer_{n}": np.zeros(1) for n in range(7)})
    message = r"layer_4 is missing and 3 more$"
    with pytest.raises(DataError, match=message):
        restore_weights(tmp_path, other, {}, print)


@pytest.mark.slow
def test_run_restored_from_another_network_fails(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    restore = f"checkpoint.restore={unbroken}"
    with pytest.raises(DataError, match=r"of another recipe: .*this network needs") as caught:
        run(tiny(EVAL_ONLY, restore), tmp_path)
    assert caught.value.exit_status == 2


@pytest.mark.medium
@pytest.mark.parametrize("where", ["nowhere", "", str(make_checkpoint_path(Path(FOLDER), 46))])
def test_missing_checkpoint_is_named_with_valid_forms(
    where: str, unbroken: Path, tmp_path: Path
) -> None:
    folder = (unbroken if where.startswith(FOLDER) else tmp_path) / where
    with pytest.raises(DataError) as caught:
        restore_weights(folder, state_of(0), {}, print)
    assert str(caught.value) == (
        f"{folder}: holds no checkpoint; name a run directory, its "
        "checkpoints folder or one checkpoint in there"
    )


def save_noise(folder: Path, steps: Sequence[int]) -> None:
    """Save 80 kB that can't be compressed at each step."""
    noise = np.random.default_rng(0).normal(size=(100, 100))
    with Checkpoints(folder, kept(5, None)) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_of(step, kernel=noise), {}, None)


def test_background_write_error_is_raised(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Files can't grow beyond 20 kB here. Written in the background, so the error comes later."""
    message = r"can't save step 3: .*File too large"
    for name, steps in (("at the end", [3]), ("at the next", [3, 4])):
        (tmp_path / name).mkdir()
        with files_end_at(20_000), pytest.raises(RunError, match=message):
            save_noise(tmp_path / name, steps)
        assert outcome.checkpoints(tmp_path / name) == []
    assert capfd.readouterr().err == ""


@pytest.mark.slow
@pytest.mark.mlp
def test_full_disk_fails_run_and_keeps_saved_checkpoints(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saves, original = "checkpoint.every_steps=10", XlaExecutable.run
    with ExitStack() as full:

        def go(self: XlaExecutable, state: TrainState, start: int, *more: Any) -> Any:
            if start == 20:
                outcome.arrays(tmp_path, 20)
                full.enter_context(files_end_at(20_000))
            return original(self, state, start, *more)

        monkeypatch.setattr(XlaExecutable, "run", go)
        monkeypatch.setattr(Checkpoints, "save", patiently(Checkpoints.save))
        with pytest.raises(RunError, match=r"can't save step 30: .*File too large") as caught:
            run(tiny(saves), tmp_path)
    assert caught.value.exit_status == 1
    assert outcome.read_summary(tmp_path)["status"] == "failed"
    assert outcome.checkpoints(tmp_path) == [10, 20]
    monkeypatch.undo()
    summary = run(tiny(saves, f"train.resume={tmp_path}"))
    assert (summary.status, summary.resumed_from) == ("done", {"run": str(tmp_path), "step": 20})
    assert [line["step"] for line in outcome.metrics(tmp_path)] == list(range(1, 46))


def patiently(save: Callable[..., None]) -> Callable[..., None]:
    """Save, and wait until it is on disk."""

    def save_and_wait(self: Checkpoints, *args: Any) -> None:
        save(self, *args)
        self.finish()

    return save_and_wait


def test_read_only_folder_fails_save_and_keeps_checkpoints(
    tmp_path: Path,
) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, None)
        checkpoints.finish()
        save = patiently(Checkpoints.save)
        with (
            nobody_may_write(tmp_path / "checkpoints"),
            pytest.raises(RunError, match=r"can't save step 2: .*Permission denied"),
        ):
            save(checkpoints, 2, state_of(2), {}, None)
    assert outcome.checkpoints(tmp_path) == [1]
    assert outcome.arrays(tmp_path)["step"] == 1


@contextmanager
def nobody_may_write(folder: Path) -> Iterator[None]:
    """Whoever runs this: what root may do, it does not do here as root."""
    folder.chmod(0o500)
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)
        folder.chmod(0o700)


def test_uncreatable_checkpoint_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(RunError, match=r"checkpoints: can't make it: .*"):
        Checkpoints(tmp_path, kept(5, None))


@pytest.mark.medium
def test_mkdir_failure_ends_save_and_its_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them it is: a process can't end before its threads."""
    before, mkdir = set(threading.enumerate()), os.mkdir
    for fails_at in range(2, 7):
        (tmp_path / str(fails_at) / "checkpoints").mkdir(parents=True)
        calls = itertools.count(1)

        def refuse(
            path: Any, *more: Any, at: int = fails_at, calls: Any = calls, **named: Any
        ) -> None:
            if "/checkpoints" in str(path) and next(calls) == at:
                raise OSError(errno.ENOSPC, "No space left on device", str(path))
            mkdir(path, *more, **named)

        with monkeypatch.context() as full:
            full.setattr(os, "mkdir", refuse)
            checkpoints = Checkpoints(tmp_path / str(fails_at), kept(5, "loss"))
            checkpoints.save(1, state_of(1), {}, {"loss": 0.5})
            with pytest.raises(RunError, match=r"can't save step 1: .*No space left on device"):
                checkpoints.__exit__(None, None, None)
        assert list((tmp_path / str(fails_at) / "checkpoints").iterdir()) == []
    left = [t for t in threading.enumerate() if t not in before and not t.daemon]
    for thread in left:
        thread.join(10)
    assert [thread for thread in left if thread.is_alive()] == []


@pytest.mark.slow
def test_run_with_lost_arrays_is_not_started_over(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    """The folder looks to orbax as if it were saved."""
    run_dir = broken(unbroken, tmp_path / "run", 40)
    for step in outcome.checkpoints(run_dir):
        shutil.rmtree(make_checkpoint_path(run_dir / "checkpoints", step) / "state")
    with pytest.raises(DataError, match=r"none of its checkpoints can be read: .*; to start over,"):
        run(tiny(*COURSE, f"train.resume={run_dir}"))
    shutil.rmtree(run_dir / "checkpoints")
    run(tiny(*COURSE, f"train.resume={run_dir}", "checkpoint.keep=99"))
    outcome.assert_equal_arrays(outcome.arrays(run_dir), outcome.arrays(unbroken))


@pytest.mark.medium
def test_new_run_refuses_folder_with_other_checkpoints(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    shutil.copytree(unbroken / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(DataError, match=r"holds a run without its recipe.yaml"):
        run(tiny(*COURSE, "seed=5"), tmp_path)
    assert outcome.checkpoints(tmp_path) == outcome.checkpoints(unbroken)


@pytest.mark.slow
def test_foreign_folders_do_not_displace_checkpoints(
    unbroken: Path, tiny: Compose, tmp_path: Path
) -> None:
    run_dir = broken(unbroken, tmp_path / "run", 10)
    (make_checkpoint_path(run_dir / "checkpoints", 2019) / "photos").mkdir(parents=True)
    (make_checkpoint_path(run_dir / "checkpoints", 45)).write_text("a file")
    run(tiny(*COURSE, f"train.resume={run_dir}", "checkpoint.keep=99"))
    assert outcome.checkpoints(run_dir) == outcome.checkpoints(unbroken)
    outcome.assert_equal_arrays(outcome.arrays(run_dir), outcome.arrays(unbroken))
    assert (run_dir / "checkpoints" / "foreign-2019-1" / "photos").is_dir()


def test_last_checkpoint_is_verified_on_exit(tmp_path: Path) -> None:
    file = make_checkpoint_path(Path(FOLDER), 2) / "host" / "metadata"
    message = f"{file}: is missing; step 2 was complete when it was saved"
    checkpoints = Checkpoints(tmp_path, kept(5, None))
    for step in (1, 2):
        checkpoints.save(step, state_of(step), {}, None)
    checkpoints.finish()
    (make_checkpoint_path(tmp_path / "checkpoints", 2) / "host" / "metadata").unlink()
    with pytest.raises(RunError, match=message) as caught:
        checkpoints.__exit__(None, None, None)
    assert caught.value.exit_status == 1


def test_original_exception_is_not_masked_by_missing_checkpoint(tmp_path: Path) -> None:
    def interrupt() -> None:
        with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
            checkpoints.save(1, state_of(1), {}, None)
            checkpoints.finish()
            shutil.rmtree(tmp_path / "checkpoints")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()


def test_removed_checkpoint_folder_is_recreated(tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        checkpoints.save(1, state_of(1), {}, None)
        checkpoints.finish()
        shutil.rmtree(tmp_path / "checkpoints")
        checkpoints.save(2, state_of(2), {}, None)
    assert outcome.checkpoints(tmp_path) == [2]


@pytest.mark.medium
def test_metrics_are_added_to_saved_step(tmp_path: Path) -> None:
    """Its evaluation had been given up: the checkpoint stays sound, and is the best now."""
    with Checkpoints(tmp_path, kept(1, "loss")) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {"loss": 0.5})
        checkpoints.save(2, state_of(2), {}, None)
    with Checkpoints(tmp_path, kept(1, "loss")) as checkpoints:
        checkpoints.save(2, state_of(2), {}, {"loss": 0.25})
        checkpoints.save(3, state_of(3), {}, {"loss": 0.75})
    assert outcome.checkpoints(tmp_path) == [2, 3]
    assert read_checkpoint(make_checkpoint_path(tmp_path / "checkpoints", 2)).step == 2


@pytest.mark.slow
@pytest.mark.parametrize("value", ['"x"', "null", "1" + "0" * 400, "NaN", "[]"])
def test_checkpoint_with_non_numeric_metric_is_not_best(value: str, tmp_path: Path) -> None:
    with Checkpoints(tmp_path, kept(1, "loss")) as checkpoints:
        checkpoints.save(1, state_of(1), {}, {"loss": 0.5})
        checkpoints.save(2, state_of(2), {}, {"loss": 0.25})
        checkpoints.finish()
        file = make_checkpoint_path(tmp_path / "checkpoints", 2) / "metrics" / "metrics"
        file.write_text(f'{{"loss": {value}}}')
        checkpoints.save(3, state_of(3), {}, {"loss": 0.75})
    assert outcome.checkpoints(tmp_path) == [3]


@pytest.mark.medium
def test_saved_checkpoint_is_readable_by_orbax(tmp_path: Path) -> None:
    """Its own manager takes a run's folder for its own."""
    with Checkpoints(tmp_path, kept(5, None)) as checkpoints:
        for step in (1, 2):
            checkpoints.save(step, state_of(step), {"early_stop": {"waited": 1}}, None)
    parts = ocp.args.Composite(state=ocp.args.StandardRestore(), host=ocp.args.JsonRestore())
    with ocp.CheckpointManager(tmp_path / "checkpoints") as manager:
        assert manager.all_steps() == [1, 2]
        read = manager.restore(2, args=parts)
    assert (int(read.state["step"]), read.host) == (2, {"early_stop": {"waited": 1}})


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_is_described_with_its_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """Whatever file of the checkpoint it hits."""
    free = SimpleNamespace(free=407_800)
    monkeypatch.setattr("pipeline.checkpoint.checkpointer.shutil.disk_usage", lambda _: free)
    error = OSError(number, os.strerror(number), str(tmp_path / "5" / "manifest.json"))
    assert describe_disk_error(error, tmp_path, 493_500) == (
        f"{os.strerror(number)}: a checkpoint takes 493.5 kB, 407.8 kB are free; make room, or "
        "keep fewer checkpoints, as in checkpoint.keep=1"
    )


def test_disk_that_cannot_hold_the_first_checkpoint_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = SimpleNamespace(free=131_100)
    monkeypatch.setattr("pipeline.checkpoint.checkpointer.shutil.disk_usage", lambda _: free)
    with Checkpoints(tmp_path, kept(1, None)) as checkpoints:
        checkpoints.require_space(131_100)
        with pytest.raises(RunError, match=r"takes 493\.5 kB, 131\.1 kB are free; make"):
            checkpoints.require_space(493_500)
        # With one it goes on: retention may make room.
        checkpoints.save(1, state_of(1), {}, None)
        checkpoints.finish()
        checkpoints.require_space(493_500)


def test_other_disk_errors_have_no_number() -> None:
    refused = OSError(errno.EACCES, "Permission denied", "/runs/checkpoints/5")
    said = describe_disk_error(refused, Path("/runs/checkpoints"), 10)
    assert said == "Permission denied: /runs/checkpoints/5"
    assert describe_disk_error(ValueError("is odd"), Path("/runs"), 10) == "is odd"
