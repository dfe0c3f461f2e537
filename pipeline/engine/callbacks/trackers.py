"""Callbacks that log a run to an experiment tracker: Weights & Biases, MLflow or Trackio.

Each step's numbers and each evaluation's metrics are logged under their step. The identifier of the
tracked run is saved in the run directory, so that a resumed run continues it. A tracker's account
and storage are set by its environment variables, since a recipe must not have secrets.
"""

from __future__ import annotations

import json
import secrets
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol

from pydantic import AfterValidator, StringConstraints

from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml
from pipeline.core.registry import Seq, component
from pipeline.engine.callbacks.callback import Callback, OnFailure, RunControl, metric_tag
from pipeline.engine.callbacks.metric_callbacks import CallbackSpec
from pipeline.training.telemetry import PLACES

if TYPE_CHECKING:
    from pipeline.engine.callbacks.callback import Evaluation
    from pipeline.training.telemetry import Telemetry

FOLDER = "trackers"
"""Folder of a run directory with a file for each tracker: the identifier of the tracked run."""
_MAX_METRICS = 1000
"""MLflow accepts at most this many metrics in one call."""
_MAX_PARAMS = 100
"""MLflow accepts at most this many parameters in one call."""
_REPEATED_STEPS = 1000
"""Most steps that a resumed run logs again because the tracker may have lost them."""
_FILES = ("recipe.yaml", "provenance.json", "metrics.jsonl", "evals.jsonl")

Row = tuple[int, Mapping[str, float]]
"""A step, and its metrics by name."""


def _require_inside(path: str) -> str:
    """Return a path inside the run directory. Raises ValueError for one outside of it."""
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise ValueError("must be a path inside of the run directory")
    return path


@dataclass(frozen=True)
class TrackedRun:
    """A run as a tracker shows it."""

    project: str
    name: str
    group: str | None
    folder: Path
    config: Mapping[str, Any]
    """Recipe, as nested sections."""
    step: int
    """Number of steps done."""


class Tracker(Protocol):
    """A session with a tracker."""

    def start(self, run: TrackedRun, run_id: str | None) -> tuple[str, int]:
        """Create a tracked run, or continue the run `run_id`.

        Returns its identifier, and its last step, or 0 if the tracker doesn't report it.
        """

    def log(self, rows: Sequence[Row]) -> None:
        """Add rows, whose steps never decrease."""

    def flush(self) -> None:
        """Wait until all rows are stored outside of this process."""

    def save_file(self, path: Path) -> None:
        """Add a file or folder as an artifact."""

    def finish(self, status: str) -> None:
        """End the session with a status: done, stopped, pruned or failed."""


class _WandbSession:
    """A session with Weights & Biases."""

    def start(self, run: TrackedRun, run_id: str | None) -> tuple[str, int]:
        import wandb

        new_id = run_id or secrets.token_hex(8)
        self._run = wandb.init(
            project=run.project,
            id=new_id,
            name=run.name,
            group=run.group,
            config=dict(run.config),
            dir=run.folder,
            resume="allow",
            # A sweep has several runs in one process, and the caller may have one too.
            reinit="create_new",
            settings=wandb.Settings(console="off", silent=True),
        )
        if run_id is not None and self._run.step == 0:
            # Offline, a killed process loses what wandb buffers, up to 32 kB of rows.
            self.log(_read_rows(run.folder / "metrics.jsonl", run.step))
        return new_id, max(self._run.step - 1, 0)  # wandb's step is the next row's.

    def log(self, rows: Sequence[Row]) -> None:
        for step, metrics in rows:
            self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        # wandb's process handles requests in order, so its answer comes after all rows.
        _ = self._run.step

    def save_file(self, path: Path) -> None:
        import wandb

        artifact = wandb.Artifact(f"{self._run.id}-{path.name}", type="run")
        if path.is_dir():
            artifact.add_dir(str(path))
        else:
            artifact.add_file(str(path))
        self._run.log_artifact(artifact)

    def finish(self, status: str) -> None:
        self._run.finish(exit_code=0 if status in ("done", "pruned") else 1)


class _MlflowSession:
    """A session with MLflow."""

    def start(self, run: TrackedRun, run_id: str | None) -> tuple[str, int]:
        from mlflow.entities import Param, RunTag
        from mlflow.tracking import MlflowClient

        self._client = MlflowClient()
        if run_id is not None:
            self._run_id = run_id
            self._client.update_run(run_id, "RUNNING")
            history = self._client.get_metric_history(run_id, "train/loss")
            return run_id, max((metric.step for metric in history), default=0)
        experiment = self._client.get_experiment_by_name(run.project)
        if experiment is not None:
            experiment_id = experiment.experiment_id
        else:
            experiment_id = self._client.create_experiment(run.project)
        self._run_id = self._client.create_run(experiment_id, run_name=run.name).info.run_id
        tags = [] if run.group is None else [RunTag("group", run.group)]
        params = [Param(key, str(value)) for key, value in _flatten(run.config)]
        for start in range(0, len(params), _MAX_PARAMS):
            chunk = params[start : start + _MAX_PARAMS]
            self._client.log_batch(self._run_id, params=chunk, tags=tags)
        return self._run_id, 0

    def log(self, rows: Sequence[Row]) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        metrics = [
            Metric(name, value, now_ms, step) for step, row in rows for name, value in row.items()
        ]
        for start in range(0, len(metrics), _MAX_METRICS):
            chunk = metrics[start : start + _MAX_METRICS]
            self._client.log_batch(self._run_id, metrics=chunk, synchronous=True)

    def flush(self) -> None:
        """Do nothing: every call has stored its rows."""

    def save_file(self, path: Path) -> None:
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), path.name)
        else:
            self._client.log_artifact(self._run_id, str(path))

    def finish(self, status: str) -> None:
        mlflow_status = {"done": "FINISHED", "pruned": "FINISHED", "stopped": "KILLED"}
        self._client.set_terminated(self._run_id, mlflow_status.get(status, "FAILED"))


class _TrackioSession:
    """A session with Trackio, without Trackio's output."""

    def start(self, run: TrackedRun, run_id: str | None) -> tuple[str, int]:
        self._tracked = run
        # Trackio finds runs by name, so the name must be unique in the project.
        name = run_id or f"{run.name}-{secrets.token_hex(4)}"
        self._open(name, resume="allow")
        return name, 0

    def log(self, rows: Sequence[Row]) -> None:
        for step, metrics in rows:
            self._run.log(dict(metrics), step=step)

    def flush(self) -> None:
        # A thread sends rows, and only the end of a session waits for it.
        self.finish("done")
        self._open(self._run.name, resume="must")

    def save_file(self, path: Path) -> None:
        with redirect_stdout(StringIO()):
            self._run.log_artifact(path, name=path.name, type="run")

    def finish(self, status: str) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            trackio.finish()

    def _open(self, name: str, resume: str) -> None:
        import trackio

        with redirect_stdout(StringIO()):
            self._run = trackio.init(
                self._tracked.project,
                name=name,
                group=self._tracked.group,
                config=dict(self._tracked.config),
                resume=resume,
                embed=False,
            )


class TrackerSpec(CallbackSpec):
    """The settings that all trackers share."""

    tracker: ClassVar[type[Tracker]]
    """Class of a session with the tracker; not needed by a subclass that overrides `open`."""
    project: Annotated[str, StringConstraints(min_length=1, max_length=128)] = "pipeline"
    group: str | None = None
    files: Seq[Annotated[str, AfterValidator(_require_inside)]] = _FILES
    """Files of the run directory that become artifacts when training ends, if they exist."""
    on_failure: OnFailure = "warn"

    def require_ready(self) -> None:
        """Raise ValueError if the tracker's package is missing."""
        if find_spec(self.name) is None:
            raise ValueError(f"needs {self.name}: pip install 'recipe-pipeline[{self.name}]'")

    def open(self) -> Tracker:
        """Return a session that hasn't started."""
        return self.tracker()

    def build(self) -> Callback:
        return TrackerCallback(self)


@component("callback")
class Wandb(TrackerSpec):
    """Log to Weights & Biases; WANDB_MODE=offline stores the run in the run directory."""

    tracker: ClassVar[type[Tracker]] = _WandbSession
    name: Literal["wandb"] = "wandb"

    def require_ready(self) -> None:
        """Raise ValueError if wandb is missing, or is online without a login."""
        super().require_ready()
        import wandb

        is_online = wandb.setup().settings.mode not in ("offline", "disabled")
        if is_online and not wandb.login(prompt=False, verify=False):
            raise ValueError("isn't logged in: run `wandb login`, or set WANDB_MODE=offline")


@component("callback")
class Mlflow(TrackerSpec):
    """Log to MLflow: to MLFLOW_TRACKING_URI, or else to ./mlflow.db."""

    tracker: ClassVar[type[Tracker]] = _MlflowSession
    name: Literal["mlflow"] = "mlflow"


@component("callback")
class Trackio(TrackerSpec):
    """Log to Trackio: to TRACKIO_DIR, or to the space that TRACKIO_SPACE_ID names."""

    tracker: ClassVar[type[Tracker]] = _TrackioSession
    name: Literal["trackio"] = "trackio"


class TrackerCallback(Callback):
    """Logs every step and evaluation to a tracker."""

    def __init__(self, spec: TrackerSpec) -> None:
        self.on_failure = spec.on_failure
        self._spec = spec
        self._tracker = spec.open()
        self._last_step = 0
        self._finish: Any = None

    @property
    def label(self) -> str:
        return self._spec.name

    def on_begin(self, run: RunControl) -> None:
        """Create the tracked run, or continue the one that the run directory names."""
        id_file = run.run_dir / FOLDER / f"{self._spec.name}.json"
        run_id = str(read_json(id_file)["run_id"]) if id_file.exists() else None
        config = parse_written_yaml(read_text(run.run_dir / "recipe.yaml", MAX_BYTES))
        name = run.run_dir.resolve().name
        group = self._spec.group
        tracked = TrackedRun(self._spec.project, name, group, run.run_dir, config, run.step)
        new_id, self._last_step = self._tracker.start(tracked, run_id)
        # A run that ends by an exception doesn't call `on_end`.
        self._finish = weakref.finalize(self, self._tracker.finish, "failed")
        if new_id != run_id:
            id_file.parent.mkdir(exist_ok=True)
            write_whole(id_file, json.dumps({"run_id": new_id}) + "\n")

    def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
        """Log the steps that the tracked run doesn't have yet."""
        columns = {
            f"train/{name}": column.tolist()
            for name, column in telemetry.columns.items()
            if column.dtype != bool
        }
        lines = zip(*columns.values(), strict=True)
        rows = [
            (step, dict(zip(columns, values, strict=True)))
            for step, values in enumerate(lines, telemetry.start + 1)
            if step > self._last_step
        ]
        if rows:
            self._tracker.log(rows)

    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        scalars = evaluation.scalars()
        metrics = {metric_tag(name): float(value) for name, value in scalars.items()}
        self._tracker.log([(step, metrics)])

    def on_checkpoint(self, run: RunControl, step: int) -> None:
        """Flush, since a run that is resumed from this checkpoint logs only later steps."""
        self._tracker.flush()

    def on_end(self, run: RunControl, status: str) -> None:
        """Add the files of the run, and end the session."""
        for path in self._spec.files:
            if (run.run_dir / path).exists():
                self._tracker.save_file(run.run_dir / path)
        self._finish.detach()
        self._tracker.finish(status)


def _read_rows(log: Path, last_step: int) -> list[Row]:
    """Return the last `_REPEATED_STEPS` rows of a run's metrics log that aren't after a step."""
    with log.open() as lines:
        rows: list[Row] = []
        for line in deque(lines, maxlen=_REPEATED_STEPS):
            entry = json.loads(line)
            numbers = {
                f"train/{name}": value
                for name, value in entry.items()
                if name not in PLACES and not isinstance(value, bool)
            }
            if entry["step"] <= last_step:
                rows.append((entry["step"], numbers))
        return rows


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested sections by dotted key; a list is one value."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
