"""The base of callback specs, and common callbacks: reduce_on_plateau and stop_at."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveInt

from pipeline.checkpoint.host_state import EarlyStopState
from pipeline.core.registry import Spec, component
from pipeline.engine.callbacks.callback import Callback, OnFailure, RunControl
from pipeline.engine.early_stop import EarlyStop
from pipeline.training.component_specs import list_metric_directions

if TYPE_CHECKING:
    from pipeline.engine.callbacks.callback import Evaluation
    from pipeline.training.metric_names import Direction


class CallbackSpec(Spec):
    """A callback in a recipe: the component of kind "callback"."""

    name: str
    on_failure: OnFailure = "end"

    def require_ready(self) -> None:
        """Raise ValueError with a remedy if the callback can't work, before any data is read."""

    @abstractmethod
    def build(self) -> Callback:
        """Return a new callback for a run."""


@component("callback")
class ReduceOnPlateau(CallbackSpec):
    """Multiply the learning rate by `factor`, down to `min_rate`, after each `patience` evaluations
    without an improvement of a metric."""

    name: Literal["reduce_on_plateau"] = "reduce_on_plateau"
    metric: str = "loss"
    factor: Annotated[float, Field(gt=0, lt=1)] = 0.1
    patience: PositiveInt = 5
    min_delta: NonNegativeFloat = 0.0
    min_rate: NonNegativeFloat = 0.0

    def build(self) -> Callback:
        """Return a callback whose state is the best value and the number of evaluations since."""
        return _PlateauWatch(self)


class _MetricCallback(Callback):
    """Base of the callbacks that compare a metric with its earlier values or with a number."""

    def __init__(self, spec: Any) -> None:
        self._spec = spec
        self.on_failure = spec.on_failure
        self._sign = 1 if list_metric_directions([spec.metric])[spec.metric] == "max" else -1

    @property
    def label(self) -> str:
        return str(self._spec.name)


class _PlateauWatch(_MetricCallback):
    def __init__(self, spec: ReduceOnPlateau) -> None:
        super().__init__(spec)
        better: Direction = "max" if self._sign > 0 else "min"
        self._plateau = EarlyStop(spec.metric, better, spec.patience, spec.min_delta)

    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        self._plateau.add(evaluation)
        if not self._plateau.is_over:
            return
        self._plateau.progress = EarlyStopState(self._plateau.progress.best)
        rate = run.learning_rate
        if rate > self._spec.min_rate:
            run.scale_learning_rate(max(self._spec.factor, self._spec.min_rate / rate))

    def state(self) -> Any:
        progress = self._plateau.progress
        return [self._to_signed(progress.best), progress.waited]

    def restore(self, state: Any) -> None:
        match state:
            case [int() | float() | None as best, int(waited)]:
                self._plateau.progress = EarlyStopState(self._to_signed(best), waited)
            case _:
                raise ValueError(f"{state!r} must be a value and a number of evaluations")

    def _to_signed(self, best: float | None) -> float | None:
        """Return the best value of a checkpoint, where more is better, or the metric's from it."""
        return None if best is None else self._sign * best


@component("callback")
class StopAt(CallbackSpec):
    """End training when a metric of an evaluation reaches a value."""

    name: Literal["stop_at"] = "stop_at"
    metric: str
    value: float

    def build(self) -> Callback:
        """Return a callback without a state."""
        return _StopAtValue(self)


class _StopAtValue(_MetricCallback):
    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        value = evaluation.scalars()[self._spec.metric]
        if self._sign * (value - self._spec.value) >= 0:
            run.stop(f"{self._spec.metric} is {value:.6g}")
