"""Hooks: functions and objects that a run calls between steps. By default they do nothing."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.host_state import CallbackState
from pipeline.core.host.signals import Signals
from pipeline.engine.callback_calls import NoCallbacks
from pipeline.engine.callbacks.events import Evaluation, Monitor
from pipeline.engine.deadline import Deadline, MovableEnd
from pipeline.engine.early_stop import EarlyStop
from pipeline.engine.history import Progress
from pipeline.engine.non_finite_step import Examination
from pipeline.engine.rollback import NoRollbacks
from pipeline.training.parallel.ranks import Agree, decide_alone

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpoints, NoCheckpoints
    from pipeline.training.state import TrainState
    from pipeline.training.telemetry import Telemetry

UNFINISHED = "unfinished_boundary"
"""Key in a checkpoint for the interrupted evaluation at its step."""
CALLBACKS = "callbacks"
"""Key in a checkpoint for the states of callbacks and their requests."""


@dataclass(frozen=True)
class Saves:
    """The checkpoints of a run. Each has everything that a resumed run needs."""

    writer: Checkpoints | NoCheckpoints | None = None
    """Writer of the checkpoints; None if the run saves nothing."""
    every_seconds: float | None = None
    """Longest time without a checkpoint; None: no limit."""
    host: Mapping[str, Any] = field(default_factory=dict)
    """JSON that every checkpoint has, besides the state of the hooks."""
    log_marks: Callable[[int], Mapping[str, Any]] | None = None
    """Function from a step to JSON for a checkpoint, by which a resumed run checks the logs."""

    def save(self, hooks: Hooks, run: Progress, metrics: Mapping[str, float] | None = None) -> None:
        """Notify callbacks, write the logs, then save the current state and `metrics`."""
        if self.writer is None:
            return
        step = run.history.step
        if run.saved_step != step:
            run.saved_step = step
            hooks.callbacks.notify("on_checkpoint", run.state, step, step)
        # First, since a resumed run appends to logs that must reach the checkpoint's step.
        for monitor in hooks.monitors:
            monitor.flush()
        host_state = {**self.host, "early_stop": asdict(hooks.early_stop.progress)}
        if self.log_marks is not None:
            host_state |= self.log_marks(step)
        host_state |= hooks.rollbacks.state()
        if run.pending is not None:
            host_state[UNFINISHED] = asdict(run.pending)
        callbacks = hooks.callbacks.state(run.granted)
        if callbacks != CallbackState():
            host_state[CALLBACKS] = asdict(callbacks)
        state = run.state if hooks.gather is None else hooks.gather(run.state)
        self.writer.save(step, state, host_state, metrics)


def refuse_evaluation(state: TrainState) -> Evaluation | None:
    """Raise ValueError: no function for evaluations is set."""
    raise ValueError("an evaluation is due, and no evaluation is set")


def examine_nothing(state: TrainState, step: int) -> Examination:
    """Return an examination without findings."""
    return Examination()


def do_nothing(state: TrainState, step: int) -> None:
    """Do nothing at a step."""


@dataclass(frozen=True)
class Hooks:
    """Functions and objects that a run calls between steps."""

    monitors: Sequence[Monitor] = ()
    evaluate: Callable[[TrainState], Evaluation | None] = refuse_evaluation
    """Evaluates a state; returns None if a signal to stop has interrupted it."""
    evaluate_seconds: float | None = None
    """Longest time without an evaluation; None: no limit."""
    saves: Saves = field(default_factory=Saves)
    callbacks: NoCallbacks = field(default_factory=NoCallbacks)
    early_stop: EarlyStop = field(default_factory=EarlyStop)
    prune: Callable[[str | None], str | None] = lambda verdict: None
    """Returns the reason to end the run at this boundary; None if it should continue. The argument
    is the reason that was returned before an evaluation was interrupted."""
    deadline: Deadline | MovableEnd = field(default_factory=Deadline)
    rollbacks: NoRollbacks = field(default_factory=NoRollbacks)
    on_non_finite_step: str = "stop"
    """The recipe's `train.on_nan`, on which the advice after a non-finite step depends."""
    examine: Callable[[TrainState, int], Examination] = examine_nothing
    """Examines the step that ended the run, from the state before it."""
    dump: Callable[[TrainState, int], None] = do_nothing
    """Dumps the step that follows a state, from the state and the number of steps done."""
    collect: Callable[[TrainState, int], None] = do_nothing
    """Shows the weights and gradients of a state, from the state and the number of steps done."""
    measure: Callable[[Telemetry, float], Telemetry] = lambda telemetry, seconds: telemetry
    """Adds columns to the telemetry of steps that took a number of seconds."""
    gather: Callable[[TrainState], TrainState] | None = None
    """Returns a state that this process can read; all processes call it. None: it reads any."""
    signals: Signals = field(default_factory=Signals)
    """Signals to stop or to save, which training checks after every dispatch."""
    agree: Agree = decide_alone
    """Returns in all processes what a function returns in the first one."""
