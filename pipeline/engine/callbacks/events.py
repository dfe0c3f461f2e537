"""Events of a run, and the interface of the objects that are notified of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pipeline.training.metric_names import METRICS

if TYPE_CHECKING:
    import numpy as np

    from pipeline.training.telemetry import Telemetry

TRAINED = "train_"
"""Prefix of the metrics of training samples."""


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
