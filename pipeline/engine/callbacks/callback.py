"""Callbacks: events of a run, the objects that are notified of them, and control of the run."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pipeline.training.metric_names import METRICS

if TYPE_CHECKING:
    import numpy as np

    from pipeline.training.telemetry import Telemetry

TRAINED = "train_"
"""Prefix of the metrics of training samples."""
OnFailure = Literal["end", "warn"]


def metric_tag(name: str) -> str:
    """Return the tag of an evaluation's metric in TensorBoard and trackers, `train/` or `eval/`."""
    is_train = name.startswith(TRAINED)
    return f"train/{name.removeprefix(TRAINED)}" if is_train else f"eval/{name}"


@dataclass(frozen=True)
class SinkReport:
    """A sink that ended at `step`, or a step without sinks; loss and rate belong to `step`."""

    step: int
    loss: float
    learning_rate: float
    seconds: float
    steps: int
    """Number of steps of the sink."""


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    metrics: Mapping[str, Any]
    """Metrics by name, as `summarize` returns them."""
    confusion: np.ndarray | None
    """Number of samples by true and predicted class, int (C, C); None for too many classes."""
    unit: str = "samples"
    """Plural noun for `metrics["count"]`: samples, or tokens if each token has a label."""

    def scalars(self) -> dict[str, float]:
        """Return the metrics as numbers, without the count, with macro averages over classes."""
        return {
            name: value["macro"] if isinstance(value, Mapping) else value
            for name, value in self.metrics.items()
            if name != "count"
        }

    def __str__(self) -> str:
        scalars = self.scalars()
        hidden = {*METRICS} - {"accuracy", "top5", "loss"}
        hidden_of_training = {f"{TRAINED}{name}" for name in hidden | {"top5"}}
        shown = [name for name in scalars if name not in hidden | hidden_of_training]
        texts = [f"{name} {scalars[name]:.4f}" for name in shown]
        return f"{', '.join(texts)} over {self.metrics['count']:,} {self.unit}"


class Monitor:
    """Receiver of a run's events, which can't change the run.

    A subclass ignores the events that it doesn't override.
    """

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """A sink or a part of a sink was done in `seconds`."""

    def on_sink(self, report: SinkReport) -> None:
        """A sink ended."""

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """An evaluation was done after `step` steps."""

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        """Callbacks have logged scalars by name, up to boundary `step`."""

    def on_rollback(self, step: int, to: int) -> None:
        """The non-finite `step` rolled the state back to boundary `to`; training continues."""

    def on_length(self, total: int) -> None:
        """A deadline has changed the run's number of steps to `total`."""

    def flush(self) -> None:
        """Write all events so far, so that they aren't lost if the process is killed."""

    def close(self) -> None:
        """The run ended: write the rest and release everything."""


class MonitorRelay(Monitor, ABC):
    """Monitor that passes every event on to other monitors, by `relay`."""

    @abstractmethod
    def relay(self, event: Callable[[Any], None], size_bytes: int = 0) -> None:
        """Call `event(monitor)` for each monitor; `size_bytes` are the bytes of its arrays."""

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self.relay(lambda monitor: monitor.on_steps(telemetry, seconds), telemetry.nbytes)

    def on_sink(self, report: SinkReport) -> None:
        self.relay(lambda monitor: monitor.on_sink(report))

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.relay(lambda monitor: monitor.on_eval(step, evaluation))

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self.relay(lambda monitor: monitor.on_scalars(step, scalars))

    def on_rollback(self, step: int, to: int) -> None:
        self.relay(lambda monitor: monitor.on_rollback(step, to))

    def on_length(self, total: int) -> None:
        self.relay(lambda monitor: monitor.on_length(total))


class Pruner(Monitor, ABC):
    """Monitor that may end a run that isn't worth continuing."""

    @property
    @abstractmethod
    def prune_reason(self) -> str | None:
        """Reason to end the run at this boundary; None if it should continue."""


class RunControl(Protocol):
    """A run, as its callbacks see it between two dispatches.

    A request of `on_sink` or `on_eval` takes effect at the same boundary, the one of `on_sink`
    before the boundary's evaluation. A request inside a sink waits for the next boundary, since a
    running sink isn't changed. A resumed run keeps a request, even if the callback is gone.
    """

    run_dir: Path
    total: int
    """Steps of the whole run, which a deadline may change."""
    steps_per_epoch: int
    resumed: bool
    """Whether this process continues from a checkpoint."""
    step: int
    """Number of steps done."""

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, with the changes that were requested so far."""

    def stop(self, reason: str) -> None:
        """End training at the next boundary, with the status "done"."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all updates from the next boundary on. Raises ValueError if the
        rate is negative, NaN or larger than the largest float32."""

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply learning rates from the next boundary on by a factor. Raises ValueError if the
        factor is negative, NaN or larger than the largest float32."""

    def evaluate_at(self, step: int) -> None:
        """Also evaluate after `step`. Raises ValueError if it isn't a later step."""

    def save_at(self, step: int) -> None:
        """Also save a checkpoint after a later step; at the end of a sink or after an evaluation,
        this step is allowed too. Raises ValueError for another step."""

    def evaluate(self) -> Evaluation:
        """Evaluate the current state, without an event or a line in a log. Raises ValueError in a
        run of several processes."""

    def log(self, name: str, value: float) -> None:
        """Add a scalar to scalars.jsonl and TensorBoard, at this boundary or the next one.

        Only the last value of a name is logged; null if it isn't finite.
        """

    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by path, such as `conv_0/kernel`."""

    def set_parameters(self, changed: Mapping[str, np.ndarray]) -> None:
        """Replace parameters by path when training begins, at the end of a sink or after an
        evaluation. Raises ValueError at other events, for an unknown path and for another shape."""


class Callback:
    """Code that is notified of a run's events; a subclass overrides the events it needs.

    Its state has seen each step, sink, evaluation and checkpoint once, even if a run is killed and
    resumed: a resumed run restores `state` from a checkpoint, and repeats the events after it.
    `on_steps` gets a part of a sink, the steps that fit into a time. The evaluation of the
    eval stage, after training, isn't an event. Only the first of several processes calls callbacks.
    """

    on_failure: OnFailure = "end"
    """end: an exception ends the run after its state is saved. warn: an exception is reported, and
    this process doesn't call the callback again."""

    @property
    def label(self) -> str:
        """Name in messages and in checkpoints."""
        return type(self).__name__

    def on_begin(self, run: RunControl) -> None:
        """Training begins, or continues, in this process."""

    def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
        """The steps of `telemetry` were done, from `telemetry.start + 1` on."""

    def on_sink(self, run: RunControl, report: SinkReport) -> None:
        """A sink ended; without sinks, a step."""

    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        """An evaluation was done after `step` steps."""

    def on_checkpoint(self, run: RunControl, step: int) -> None:
        """A checkpoint of `step` is about to be saved, with the state of this callback.

        A run that is stopped also saves at steps other than the recipe's.
        """

    def on_end(self, run: RunControl, status: str) -> None:
        """Training ended in this process: done, stopped or pruned. Nothing can be changed."""

    def state(self) -> Any:
        """Return the callback's state for a checkpoint, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Restore the callback's state. Raises ValueError if it isn't valid."""
