"""The base of callbacks, and the interface of the run that they get."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np

    from pipeline.engine.callbacks.events import Evaluation, SinkReport
    from pipeline.training.telemetry import Telemetry

OnFailure = Literal["end", "warn"]


class RunControl(Protocol):
    """A run, as its callbacks see it between two dispatches.

    A request takes effect at the boundary of the event, or at the next one if the event is inside a
    sink: a sink that is under way is not changed. At the end of a sink it takes effect before the
    evaluation there. A resumed run keeps it, also without the callback.
    """

    run_dir: Path
    total: int
    """Steps of the whole run."""
    steps_per_epoch: int
    resumed: bool
    """Whether this process continues from a checkpoint."""
    step: int
    """The number of steps done."""

    @property
    def learning_rate(self) -> float:
        """The learning rate of the next update."""

    def stop(self, reason: str) -> None:
        """End training at the next boundary, as done."""

    def set_learning_rate(self, rate: float) -> None:
        """Set the learning rate of all updates from the next boundary on.

        Raises ValueError for one that is negative or beyond float32.
        """

    def scale_learning_rate(self, factor: float) -> None:
        """Multiply the schedule by a factor from the next boundary on. Raises ValueError."""

    def evaluate_at(self, step: int) -> None:
        """Evaluate after a later step too. Raises ValueError if it isn't a later step."""

    def save_at(self, step: int) -> None:
        """Save a checkpoint after a later step too, or after this one at the end of a sink or after
        an evaluation. Raises ValueError for another step."""

    def evaluate(self) -> Evaluation:
        """Evaluate the state as it is now, without an event or a line in a log. Raises ValueError
        in a run of several processes."""

    def log(self, name: str, value: float) -> None:
        """Add a scalar to scalars.jsonl and TensorBoard, at the next boundary or this one.

        The last value of a name is logged there; one that is not finite becomes null.
        """

    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by path, as `conv_0/kernel`, at a boundary."""

    def set_parameters(self, changed: Mapping[str, np.ndarray]) -> None:
        """Replace parameters by path, as training begins, at the end of a sink or after an
        evaluation. Raises ValueError elsewhere, for an unknown path and for another shape."""


class Callback:
    """Code that is notified of a run's events; a subclass overrides the events it needs.

    It is notified of each step, sink, evaluation and checkpoint once, also if a run is killed and
    resumed, as long as `state` returns what it needs: a checkpoint holds that, and a resumed run
    repeats what happened after the checkpoint. The steps of a sink come in chunks whose lengths
    depend on time; `on_steps` should count steps, not calls. The evaluation of the eval stage,
    after training, isn't an event. Of several processes the first one calls its callbacks.
    """

    on_failure: OnFailure = "end"
    """end: an exception ends the run, once its state is saved; warn: it is reported, and this
    process doesn't call the callback again."""

    @property
    def label(self) -> str:
        """The name in messages, and in checkpoints."""
        return type(self).__name__

    def on_begin(self, run: RunControl) -> None:
        """Training begins, or continues, in this process."""

    def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
        """Steps `telemetry.start + 1 ..` were done."""

    def on_sink(self, run: RunControl, report: SinkReport) -> None:
        """A sink ended; without sinks, a step."""

    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        """An evaluation was done after `step` steps."""

    def on_checkpoint(self, run: RunControl, step: int) -> None:
        """A checkpoint of `step` is about to be saved, with the state of this callback.

        If a run is stopped, that is at other steps than the recipe's.
        """

    def on_end(self, run: RunControl, status: str) -> None:
        """Training ended in this process: done, stopped or pruned. Nothing can be changed."""

    def state(self) -> Any:
        """Return what a checkpoint holds of this callback, as JSON."""
        return None

    def restore(self, state: Any) -> None:
        """Restore what a checkpoint holds. Raises ValueError if that is impossible."""
