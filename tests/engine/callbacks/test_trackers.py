"""Experiment trackers: each step is in the tracker's own store, also after a kill and a resume."""

from __future__ import annotations

import json
import os
import sqlite3
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from pipeline.checkpoint.checkpoint_folder import make_checkpoint_path
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.engine.callbacks import trackers
from pipeline.engine.callbacks.callback import Callback
from pipeline.engine.callbacks.trackers import (
    FOLDER,
    Mlflow,
    Row,
    TrackedRun,
    TrackerCallback,
    TrackerSpec,
    Wandb,
)
from tests.conftest import MLP
from tests.whole_run import run

Compose = Callable[..., Recipe]


class _Session:
    """A tracker that keeps its rows in memory."""

    def __init__(self, stored: int = 0) -> None:
        self.stored = stored
        self.run_id: str | None = None
        self.config: Mapping[str, Any] = {}
        self.rows: list[Row] = []
        self.calls: list[str] = []

    def start(self, run: TrackedRun, run_id: str | None) -> tuple[str, int]:
        self.run_id, self.config = run_id, run.config
        return run_id or "new", self.stored

    def log(self, rows: Sequence[Row]) -> None:
        self.rows += rows

    def flush(self) -> None:
        self.calls.append("flush")

    def save_file(self, path: Path) -> None:
        self.calls.append(path.name)

    def finish(self, status: str) -> None:
        self.calls.append(status)


def _callback(session: _Session, monkeypatch: pytest.MonkeyPatch) -> Callback:
    monkeypatch.setattr(Mlflow, "tracker", staticmethod(lambda: session))
    return TrackerCallback(Mlflow())


def _losses(run_dir: Path) -> dict[int, np.float32]:
    lines = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: np.float32(line["loss"]) for line in lines}


def test_session_opens_with_the_settings_of_its_spec() -> None:
    class _Ours(TrackerSpec):
        name: Literal["ours"] = "ours"
        stored: int = 3

        def open(self) -> _Session:
            return _Session(self.stored)

    callback = _Ours(stored=27).build()
    assert isinstance(callback, TrackerCallback)
    assert callback._tracker.start(TrackedRun("a", "b", None, Path(), {}, 0), None) == ("new", 27)


@pytest.mark.medium
def test_steps_evaluations_and_files_are_logged(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _Session()
    recipe = tiny(*MLP, "eval.every_steps=15", "train.sink_size=10", "checkpoint.every_steps=20")
    run(recipe, tmp_path / "run", callbacks=[_callback(session, monkeypatch)])
    losses = {step: np.float32(row["train/loss"]) for step, row in session.rows if len(row) == 4}
    assert losses == _losses(tmp_path / "run")
    assert [step for step, row in session.rows if "eval/accuracy" in row] == [15, 30, 45]
    assert [step for step, _ in session.rows] == sorted(step for step, _ in session.rows)
    assert session.config["train"]["sink_size"] == 10
    assert json.loads((tmp_path / "run" / FOLDER / "mlflow.json").read_text()) == {"run_id": "new"}
    files = ["recipe.yaml", "provenance.json", "metrics.jsonl", "evals.jsonl", "done"]
    assert session.calls == ["flush"] * 3 + files


@pytest.mark.slow
def test_resumed_run_continues_its_tracked_run_without_repeated_steps(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    recipe = tiny(*MLP, "checkpoint.every_steps=10", "train.sink_size=5")

    class _Stop(Callback):
        def on_sink(self, control: Any, report: Any) -> None:
            if report.step == 25:
                raise RuntimeError("as if killed")

    with pytest.raises(Exception, match="as if killed"):
        run(recipe, run_dir, callbacks=[_callback(_Session(), monkeypatch), _Stop()])
    session = _Session(stored=27)
    resumed = tiny(
        *MLP, "checkpoint.every_steps=10", "train.sink_size=5", f"train.resume={run_dir}"
    )
    run(resumed, callbacks=[_callback(session, monkeypatch)])
    assert session.run_id == "new"
    assert [step for step, row in session.rows if "train/loss" in row] == list(range(28, 46))


@pytest.mark.medium
def test_missing_package_is_reported_before_data_is_read(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "find_spec", lambda name: None)
    recipe = tiny("train.callbacks=[wandb,trackio]")
    with pytest.raises(RecipeError) as caught:
        run(recipe, tmp_path / "run")
    assert list(caught.value.problems) == [
        "train.callbacks.0 (wandb): needs wandb: pip install 'recipe-pipeline[wandb]'",
        "train.callbacks.1 (trackio): needs trackio: pip install 'recipe-pipeline[trackio]'",
    ]


@pytest.mark.medium
@pytest.mark.parametrize("path", ["/etc/passwd", "../other", "a/../../b"])
def test_files_outside_the_run_directory_are_refused(path: str, tiny: Compose) -> None:
    with pytest.raises(RecipeError, match="must be a path inside of the run directory"):
        tiny(f"train.callbacks=[{{name: mlflow, files: ['{path}']}}]")


@pytest.mark.slow
def test_failing_tracker_is_a_warning(
    tiny: Compose, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = _Session()

    def fail(rows: Sequence[Row]) -> None:
        raise OSError("no connection")

    monkeypatch.setattr(session, "log", fail)
    summary = run(tiny(*MLP), tmp_path / "run", callbacks=[_callback(session, monkeypatch)])
    assert summary.status == "done"
    assert (
        "callback mlflow, on_steps: OSError: no connection"
        in (tmp_path / "run" / "run.log").read_text()
    )


needs_trackers = pytest.mark.skipif(
    not all(map(find_spec, ("wandb", "mlflow", "trackio"))),
    reason="needs the extras wandb, mlflow and trackio",
)


@needs_trackers
@pytest.mark.slow
def test_wandb_without_a_login_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path))
    with pytest.raises(ValueError, match="run `wandb login`, or set WANDB_MODE=offline"):
        Wandb().require_ready()


@needs_trackers
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_stores_have_every_step_after_a_kill_and_a_resume(cache: Path, tmp_path: Path) -> None:
    environment = {
        # A service that another test has started would outlive the killed run.
        **{name: value for name, value in os.environ.items() if name != "WANDB_SERVICE"},
        "XDG_CACHE_HOME": str(cache.parent),
        "WANDB_MODE": "offline",
        "TRACKIO_DIR": str(tmp_path / "trackio"),
        "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path / 'mlflow.db'}",
    }
    overrides = ["+recipe=lenet5_digits", "train.steps=3000", "train.sink_size=100"]
    overrides += ["checkpoint.every_steps=500", "train.dispatch_seconds=0.1"]
    overrides += ["train.callbacks=[wandb,mlflow,trackio]"]
    command = [sys.executable, "-m", "pipeline", *overrides]
    killed = subprocess.Popen([*command, "hydra.run.dir=run"], cwd=tmp_path, env=environment)
    deadline = time.monotonic() + 300
    while not (
        make_checkpoint_path(tmp_path / "run" / "checkpoints", 1000) / "manifest.json"
    ).exists():
        assert killed.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    killed.kill()
    killed.wait()
    subprocess.run([*command, "train.resume=run"], cwd=tmp_path, env=environment, check=True)

    run_dir = tmp_path / "run"
    losses = _losses(run_dir)
    assert sorted(losses) == list(range(1, 3001))
    ids = {
        name: json.loads((run_dir / FOLDER / f"{name}.json").read_text())["run_id"]
        for name in ("wandb", "mlflow", "trackio")
    }
    in_mlflow = _rows_of_mlflow(tmp_path, ids["mlflow"])
    assert max(map(len, in_mlflow.values())) == 1
    for rows in (in_mlflow, _rows_of_trackio(tmp_path, ids["trackio"]), _rows_of_wandb(run_dir)):
        assert {step: set(values) for step, values in rows.items()} == {
            step: {loss} for step, loss in losses.items()
        }
    assert len({folder.name[-16:] for folder in (run_dir / "wandb").glob("offline-run-*")}) == 1


def _rows_of_mlflow(folder: Path, run_id: str) -> dict[int, list[np.float32]]:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{folder / 'mlflow.db'}")
    rows = defaultdict(list)
    for metric in client.get_metric_history(run_id, "train/loss"):
        rows[metric.step].append(np.float32(metric.value))
    assert client.get_run(run_id).info.status == "FINISHED"
    return rows


def _rows_of_trackio(folder: Path, name: str) -> dict[int, list[np.float32]]:
    (database,) = (folder / "trackio").glob("*.db")
    rows = defaultdict(list)
    connection = sqlite3.connect(database)
    query = "select step, metrics from metrics where run_name = ?"
    for step, text in connection.execute(query, (name,)):
        metrics = json.loads(text)
        if "train/loss" in metrics:
            rows[step].append(np.float32(metrics["train/loss"]))
    connection.close()
    return rows


def _rows_of_wandb(run_dir: Path) -> dict[int, list[np.float32]]:
    rows = defaultdict(list)
    for file in (run_dir / "wandb").glob("offline-run-*/*.wandb"):
        for record in _records(file.read_bytes()):
            items = record.history.item
            row = {(item.key or item.nested_key[0]): json.loads(item.value_json) for item in items}
            if "train/loss" in row:
                rows[row["_step"]].append(np.float32(row["train/loss"]))
    return rows


def _records(content: bytes) -> Iterator[Any]:
    """Yield the records of a wandb file: a header of 7 bytes, then LevelDB's log format."""
    from wandb.proto.wandb_internal_pb2 import Record

    header = struct.Struct("<IHB")
    position = header.size
    payload = b""
    while position + header.size <= len(content):
        room = 32768 - position % 32768
        if room < header.size:
            position += room
            continue
        _, size, kind = header.unpack_from(content, position)
        position += header.size
        payload += content[position : position + size]
        position += size
        if kind in (1, 4):  # Whole, or the last part.
            record = Record()
            record.ParseFromString(payload)
            payload = b""
            yield record
