from __future__ import annotations

import errno
import signal
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.backends.base import Mechanism
from pipeline.checkpoint.restore import parse_host_state
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import schedule_events
from pipeline.core.errors import RunError
from pipeline.core.host.signals import Signals, handle_signals
from pipeline.engine import loop as stage
from pipeline.engine.callbacks.callback import Evaluation, SinkReport
from pipeline.engine.history import MAX_TIMED_DISPATCHES, History
from pipeline.engine.hooks import Deadline, Hooks, Saves
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.schedule import RunSchedule
from pipeline.stages.runner.open_training import make_early_stop
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.test_monitors import EVALUATION
from tests.step_rows import telemetry_of

Compose = Callable[..., Recipe]

NO_DEADLINE = Deadline()


class Script:
    """A run in which nothing is computed: what happens is written down, with a clock of its own.

    A step takes `step_s`; its loss is its number, and the evaluations come out as scripted.
    """

    def __init__(self, step_s: float = 0.001, accuracies: tuple[float, ...] = ()) -> None:
        self.events: list[str] = []
        self.dispatched: list[int] = []
        self.saved: dict[int, tuple[Mapping[str, Any], Mapping[str, float] | None]] = {}
        self.reports: list[SinkReport] = []
        self.now = 0.0
        self.signals = Signals()
        self.signal, self.signal_at = signal.SIGTERM, 0
        self.nan_step: int | None = None
        self.signal_in_evaluation: signal.Signals | None = None
        self.prune_reasons: dict[int, str] = {}
        self.prune_reason: str | None = None
        self.flushed = 0
        self._step_s, self._accuracies = step_s, list(accuracies)

    # The executable.

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        self.dispatched.append(stop - start)
        self.now += self._step_s * (stop - start)
        if start < self.signal_at <= stop:
            signal.raise_signal(self.signal)
        rows = np.array([[step, 0.1, 1.0, 1.0, 0.0] for step in range(start + 1, stop + 1)])
        if self.nan_step is not None and start < self.nan_step <= stop:
            rows = rows[: self.nan_step - start]
            rows[-1, 0] = np.nan
            stop = self.nan_step - 1
        return state_at(stop), telemetry_of(start, rows)

    # A monitor.

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self.events.append(f"steps {telemetry.start + 1}-{telemetry.start + len(telemetry)}")

    def on_sink(self, report: SinkReport) -> None:
        self.reports.append(report)
        self.events.append(f"sink {report.step}")
        self.prune_reason = self.prune_reasons.get(report.step)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.events.append(f"notified {step}")

    def flush(self) -> None:
        self.flushed = len(self.events)

    def close(self) -> None:
        raise AssertionError("closing is not training's business")

    def prune(self, verdict: str | None) -> str | None:
        return self.prune_reason or verdict

    # The checkpoints.

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        assert int(state.step) == step
        if step not in self.saved:
            assert self.flushed == len(self.events), "a checkpoint ahead of the log"
            self.events.append(f"save {step}")
            self.saved[step] = host, metrics

    def evaluate(self, state: TrainState) -> Evaluation | None:
        self.events.append(f"eval {int(state.step)}")
        if self.signal_in_evaluation is not None:
            signal.raise_signal(self.signal_in_evaluation)
        if self.signals.stop is not None:
            return None
        accuracy = self._accuracies.pop(0) if self._accuracies else 0.5
        metrics = {**EVALUATION.metrics, "accuracy": accuracy, "loss": 1 - accuracy}
        return Evaluation(metrics, EVALUATION.confusion)


def _saves(script: Script, recipe: Recipe) -> Saves:
    return Saves(script, recipe.checkpoint.save_seconds)


def state_at(step: int) -> TrainState:
    return TrainState(np.int32(step), {}, {}, (), {})


@pytest.fixture
def play(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> Callable[..., History]:
    """Train along a script: 6 steps an epoch, sinks of 8, 20 steps by default."""

    def go(
        script: Script,
        *overrides: str,
        first: int = 0,
        host: Mapping[str, Any] | None = None,
        saves: bool = True,
        deadline: Deadline = NO_DEADLINE,
    ) -> History:
        clock = SimpleNamespace(perf_counter=lambda: script.now, monotonic=lambda: script.now)
        monkeypatch.setattr(stage, "time", clock)
        recipe = tiny("train.steps=20", "train.sink_size=8", *overrides)
        run_schedule = RunSchedule(20, 6, 8 if recipe.train.sink else None)
        if not saves:
            stages = tuple(stage for stage in recipe.stages if stage != "checkpoint")
            recipe = recipe.model_copy(update={"stages": stages})
        hooks = Hooks(
            monitors=[script],
            evaluate=script.evaluate,
            evaluate_seconds=recipe.eval.every_seconds,
            saves=_saves(script, recipe) if saves else Saves(),
            early_stop=make_early_stop(recipe.monitor.early_stop),
            prune=script.prune if script.prune_reasons else lambda verdict: None,
            signals=script.signals,
            deadline=deadline,
        )
        program = Program(script)  # type: ignore[arg-type]
        schedule = schedule_events(recipe, run_schedule)
        state, kept = state_at(first), parse_host_state(host or {})
        history = History(first)
        with handle_signals(script.signals), script.signals.hold_stops():
            state = exhaust(train(program, state, schedule, hooks, kept, history))
        assert int(state.step) == history.step
        return history

    return go


Play = Callable[..., History]


def test_sink_is_split_at_events_in_a_fixed_order(play: Play) -> None:
    """Telemetry, the end of the sink, evaluation, the checkpoint."""
    script = Script()
    history = play(script, "eval.every_steps=8", "checkpoint.every_steps=8")
    assert script.events == [
        "steps 1-1",
        "steps 2-8",
        "sink 8",
        "eval 8",
        "notified 8",
        "save 8",
        "steps 9-16",
        "sink 16",
        "eval 16",
        "notified 16",
        "save 16",
        "steps 17-20",
        "sink 20",
        "save 20",
    ]
    assert (history.step, history.status, history.reason) == (20, "done", None)


@pytest.mark.slow
def test_events_inside_a_sink_happen_at_their_step(play: Play) -> None:
    script = Script()
    play(script, "eval.every_epochs=1", "checkpoint.every_steps=5")
    evals = [event for event in script.events if event.startswith("eval")]
    assert evals == ["eval 6", "eval 12", "eval 18"]
    assert list(script.saved) == [5, 10, 15, 20]
    assert [event for event in script.events if event.startswith("sink")] == [
        "sink 8",
        "sink 16",
        "sink 20",
    ]


@pytest.mark.slow
def test_chunked_sink_is_reported_once(play: Play) -> None:
    script = Script(step_s=0.25)
    play(script, "checkpoint.every_steps=5")
    first, second, last = script.reports
    assert (first.step, first.steps, first.seconds) == (8, 8, 2.0)
    assert (second.step, second.steps, second.loss) == (16, 8, 16.0)
    assert (last.step, last.steps, last.learning_rate) == (20, 4, np.float32(0.1))


@pytest.mark.slow
def test_every_step_is_reported_without_sinks(play: Play) -> None:
    """S-07."""
    script = Script()
    play(script, "train.sink=false")
    assert [report.step for report in script.reports] == list(range(1, 21))
    assert script.dispatched == 20 * [1]


@pytest.mark.slow
def test_resumed_run_continues_inside_a_sink(play: Play) -> None:
    script = Script()
    play(script, "eval.every_steps=8", first=10)
    assert [event for event in script.events if not event.startswith("steps")] == [
        "sink 16",
        "eval 16",
        "notified 16",
        "sink 20",
        "save 20",
    ]
    assert sum(script.dispatched) == 10


@pytest.mark.slow
def test_finished_run_only_saves(play: Play) -> None:
    script = Script()
    history = play(script, first=20)
    assert script.events == ["save 20"]
    assert (history.step, history.loss, history.step_ms) == (20, None, None)


@pytest.mark.slow
def test_final_state_is_saved_once(play: Play) -> None:
    script = Script()
    play(script, "checkpoint.every_steps=10")
    assert script.events.count("save 20") == 1


@pytest.mark.slow
def test_checkpoints_are_not_saved_without_the_checkpoint_stage(play: Play) -> None:
    script = Script()
    play(script, "checkpoint.every_steps=3", saves=False)
    assert script.saved == {}
    assert script.events[1] == "steps 2-8"


def test_best_checkpoint_is_saved_with_every_evaluation(play: Play) -> None:
    script = Script(accuracies=(0.25, 0.75))
    play(script, "checkpoint.best=accuracy", "eval.every_steps=8")
    assert list(script.saved) == [8, 16, 20]
    assert [metrics and metrics["accuracy"] for _, metrics in script.saved.values()] == [
        0.25,
        0.75,
        None,
    ]


@pytest.mark.slow
def test_every_seconds_saves_between_dispatches(play: Play) -> None:
    """K-01: a period in seconds, whatever the steps are."""
    script = Script(step_s=1.0)
    play(script, "checkpoint.every_seconds=4.5", "train.dispatch_seconds=1.0")
    assert list(script.saved) == [5, 10, 15, 20]


@pytest.mark.medium
@pytest.mark.parametrize(
    ("keys", "steps"),
    [
        # After 4.5 s, at the end of the next dispatch; the next 4.5 s begin there.
        (["eval.every_seconds=4.5"], [6, 12, 18]),
        # Evaluations at steps begin the seconds anew, and stay at their steps within sinks of 8.
        (["eval.every_seconds=4.5", "eval.every_steps=3"], [3, 6, 9, 12, 15, 18]),
        (["eval.every_seconds=4.5", "eval.every_steps=7"], [6, 7, 13, 14, 20]),
        (["eval.every_seconds=100"], []),
        (["eval.every_steps=3"], [3, 6, 9, 12, 15, 18]),
    ],
)
def test_evaluation_is_due_by_steps_or_seconds(
    play: Play, keys: list[str], steps: list[int]
) -> None:
    script = Script(step_s=1.0)
    play(script, *keys, "train.dispatch_seconds=1.0")
    evaluated = [event for event in script.events if event.startswith("eval")]
    assert evaluated == [f"eval {step}" for step in steps]


@pytest.mark.slow
def test_long_run_saves_every_ten_minutes_by_default(play: Play) -> None:
    script = Script(step_s=100.0)
    play(script, "train.dispatch_seconds=100")
    assert list(script.saved) == [6, 12, 18, 20]


@pytest.mark.slow
@pytest.mark.parametrize(("every", "saved"), [(4, [4, 8, 12, 16, 20]), (7, [5, 7, 12, 14, 19, 20])])
def test_checkpoint_is_saved_by_steps_or_seconds_first(
    play: Play, every: int, saved: list[int]
) -> None:
    """K-01: seconds count from the last checkpoint, whatever has saved it."""
    script = Script(step_s=1.0)
    steps = f"checkpoint.every_steps={every}"
    play(script, steps, "checkpoint.every_seconds=4.5", "train.dispatch_seconds=1.0")
    assert list(script.saved) == saved


@pytest.mark.slow
def test_dispatches_fill_dispatch_seconds(play: Play) -> None:
    """The first is a single step, to learn what a step takes."""
    script = Script(step_s=0.25)
    play(script, "train.dispatch_seconds=1.0", "train.sink_size=20")
    assert script.dispatched == [1, 4, 3, 4, 4, 4]
    assert max(script.dispatched) * 0.25 <= 1.0


def test_step_longer_than_dispatch_seconds_is_dispatched_singly(play: Play) -> None:
    script = Script(step_s=5.0)
    play(script, "train.dispatch_seconds=1.0")
    assert script.dispatched == 20 * [1]


def test_median_step_time_covers_the_newest_dispatches(
    play: Play, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounded: a run without sinks dispatches as often as it steps."""
    history = play(Script(step_s=0.25), "train.sink=false")
    assert len(history.step_seconds) == 19
    history.step_seconds.extend(2 * MAX_TIMED_DISPATCHES * [0.5])
    assert len(history.step_seconds) == MAX_TIMED_DISPATCHES
    assert history.median_step_ms == 500.0


def test_first_step_time_is_the_end_of_the_first_dispatch(play: Play) -> None:
    history = play(Script(step_s=0.25))
    assert (history.first_dispatch_s, history.first_step_at) == (0.25, 0.25)


def test_step_time_excludes_the_first_dispatch(play: Play) -> None:
    script = Script(step_s=0.25)
    history = play(script)
    assert (history.step_ms, history.median_step_ms, history.train_s) == (250.0, 250.0, 5.0)


def test_step_time_includes_waits_for_data() -> None:
    """The median of many dispatches hides the few that wait for a window."""
    history = History(0)
    history.add_dispatch(10, 9.0, 9.0)
    for seconds in (1.0, 1.0, 7.0):
        history.add_dispatch(10, seconds, 0.0)
    assert history.step_ms == 300.0
    assert history.median_step_ms == 100.0


EARLY = ["eval.every_steps=2", "monitor.early_stop.patience=2"]


def test_end_that_is_not_recorded_saves_before_the_error(play: Play) -> None:
    """The deadline is over at the first boundary, and its earlier end can't be written."""

    def fail(step: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "recipe.yaml")

    script = Script()
    with pytest.raises(OSError, match="No space left on device"):
        play(script, deadline=Deadline(0.0, note_end=fail))
    assert list(script.saved) == [script.dispatched[0]]


def test_early_stop_saves_after_its_patience(play: Play) -> None:
    script = Script(accuracies=(0.5, 0.75, 0.75, 0.5, 0.9))
    history = play(script, *EARLY, "monitor.early_stop.metric=accuracy")
    assert history.step == 8
    assert (history.status, history.reason) == ("done", "early stop: accuracy no better than 0.75")
    assert list(script.saved) == [8]
    assert script.saved[8][0] == {"early_stop": {"best": 0.75, "waited": 2}}


@pytest.mark.slow
def test_early_stop_minimises_the_loss(play: Play) -> None:
    script = Script(accuracies=(0.1, 0.2, 0.3, 0.4, 0.3, 0.2))
    history = play(script, *EARLY, "monitor.early_stop.metric=loss")
    assert history.step == 12


@pytest.mark.medium
def test_early_stop_requires_min_delta(play: Play) -> None:
    script = Script(accuracies=(0.5, 0.55, 0.6))
    delta = "monitor.early_stop.min_delta=0.2"
    history = play(script, *EARLY, "monitor.early_stop.metric=accuracy", delta)
    assert history.step == 6


@pytest.mark.parametrize(
    ("accuracies", "stopped", "reason"),
    [
        ((float("nan"), 0.5, 0.6, 0.7, 0.8), None, None),
        ((float("nan"), float("nan")), 4, "accuracy is no number in 2 evaluations"),
        ((0.5, float("nan"), float("nan"), 0.9), 6, "accuracy no better than 0.5"),
    ],
)
def test_nan_metric_is_not_an_improvement(
    accuracies: tuple[float, ...], stopped: int | None, reason: str | None, play: Play
) -> None:
    history = play(Script(accuracies=accuracies), *EARLY, "monitor.early_stop.metric=accuracy")
    if stopped is None:
        assert history.step > 4, "the first number is the best so far"
    else:
        assert (history.step, history.reason) == (stopped, f"early stop: {reason}")


def test_early_stop_state_survives_a_resume(play: Play) -> None:
    script = Script(accuracies=(0.6,))
    kept = {"early_stop": {"best": 0.75, "waited": 1}}
    early = [*EARLY, "monitor.early_stop.metric=accuracy"]
    assert play(script, *early, first=4, host=kept).step == 6


def test_early_stopped_run_is_done_after_a_resume(play: Play) -> None:
    """Killed between the checkpoint of the last boundary and the summary."""
    kept = {"early_stop": {"best": 0.75, "waited": 2}}
    early = [*EARLY, "monitor.early_stop.metric=accuracy"]
    history = play(Script(accuracies=(0.9,)), *early, first=8, host=kept)
    assert (history.step, history.status) == (8, "done")
    assert history.reason == "early stop: accuracy no better than 0.75"


@pytest.mark.slow
def test_last_evaluation_is_stored_for_the_eval_stage(play: Play) -> None:
    history = play(Script(accuracies=(0.25, 0.75)), "eval.every_steps=10")
    assert {step: e.metrics["accuracy"] for step, e in history.evaluated.items()} == {20: 0.75}


@pytest.mark.parametrize("nan_step", [1, 8, 13])
def test_non_finite_loss_ends_the_run_with_the_documented_message(
    nan_step: int, play: Play
) -> None:
    """C-02: step counted within the sink, then the true one."""
    script = Script()
    script.nan_step = nan_step
    with pytest.raises(RunError) as caught:
        play(script)
    sink_epoch, step = (1, nan_step) if nan_step <= 8 else (2, nan_step - 8)
    assert str(caught.value) == (
        f"epoch: {sink_epoch} step: {step}. Invalid loss, terminating training. Step {nan_step} "
        f"of 20: loss is nan, gradient norm is 1.0; the state of step {nan_step - 1} is saved"
    )
    assert list(script.saved) == [nan_step - 1]
    assert script.events[-2].endswith(f"-{nan_step}")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_signal_stops_the_run_after_the_current_dispatch(
    number: signal.Signals, play: Play
) -> None:
    script = Script()
    script.signal, script.signal_at = number, 4
    history = play(script)
    assert script.events == ["steps 1-1", "steps 2-8", "sink 8", "save 8"]
    assert (history.step, history.status) == (8, "stopped")
    assert history.reason == f"{number.name} received"


def test_save_signal_saves_after_the_current_dispatch(play: Play) -> None:
    script = Script()
    script.signal, script.signal_at = signal.SIGUSR1, 4
    history = play(script)
    assert script.events[:4] == ["steps 1-1", "steps 2-8", "sink 8", "save 8"]
    assert list(script.saved) == [8, 20]
    assert (history.step, history.status) == (20, "done")


def test_save_signal_before_training_saves_after_the_first_dispatch(play: Play) -> None:
    script = Script()
    script.signals.saves = 1
    play(script)
    assert list(script.saved) == [1, 20]


def test_stop_signal_before_training_stops_at_step_0(play: Play) -> None:
    script = Script()
    script.signals.stop = "SIGTERM received"
    history = play(script)
    assert script.events == ["save 0"]
    assert (history.step, history.status) == (0, "stopped")


@pytest.mark.slow
def test_resumed_run_begins_with_the_interrupted_evaluation(play: Play) -> None:
    """No monitor is notified of it before, and no checkpoint with metrics is saved."""
    events = "eval.every_steps=8", "checkpoint.every_steps=4"
    script = Script()
    script.signal_in_evaluation = signal.SIGTERM
    history = play(script, *events)
    assert script.events[-3:] == ["sink 8", "eval 8", "save 8"]
    assert (history.step, history.status, history.reason) == (8, "stopped", "SIGTERM received")
    host, metrics = script.saved[8]
    assert (host["unfinished_boundary"], metrics) == ({"loss": 8.0, "verdict": None}, None)

    script = Script(accuracies=(0.75,))
    history = play(script, *events, first=8, host=host)
    assert script.events[:5] == ["eval 8", "notified 8", "save 8", "steps 9-9", "steps 10-12"]
    host, metrics = script.saved[8]
    assert "unfinished_boundary" not in host
    assert metrics is not None
    assert metrics["accuracy"] == 0.75
    assert (history.step, history.status) == (20, "done")


def test_interrupted_evaluation_decides_once_it_is_done(play: Play) -> None:
    early = [*EARLY, "monitor.early_stop.metric=accuracy"]
    kept = {"early_stop": {"best": 0.75, "waited": 1}, "unfinished_boundary": GIVEN_UP}
    history = play(Script(accuracies=(0.5,)), *early, first=4, host=kept)
    assert (history.step, history.status, history.loss) == (4, "done", 4.0)
    assert history.reason == "early stop: accuracy no better than 0.75"


GIVEN_UP = {"loss": 4.0, "verdict": None}


@pytest.mark.slow
def test_interrupted_evaluation_at_the_end_stops_the_run(play: Play) -> None:
    script = Script()
    script.signal_in_evaluation = signal.SIGINT
    history = play(script, "eval.every_steps=20")
    assert (history.step, history.status, history.reason) == (20, "stopped", "SIGINT received")
    assert play(Script(), first=20, host=script.saved[20][0]).evaluated.keys() == {20}


def test_prune_reason_waits_for_an_interrupted_evaluation(play: Play) -> None:
    """The sink ended before, and its monitors are not notified of it again."""
    script = Script()
    script.prune_reasons = {8: "poor"}
    script.signal_in_evaluation = signal.SIGTERM
    history = play(script, "eval.every_steps=8")
    assert (history.status, history.reason) == ("stopped", "SIGTERM received")
    resumed = Script()
    resumed.prune_reasons = {16: "unasked"}
    history = play(resumed, "eval.every_steps=8", first=8, host=script.saved[8][0])
    assert resumed.events == ["eval 8", "notified 8", "save 8"]
    assert (history.step, history.status, history.reason) == (8, "pruned", "poor")


def test_save_signal_during_evaluation_saves_after_it(play: Play) -> None:
    script = Script()
    script.signal_in_evaluation = signal.SIGUSR1
    play(script, "eval.every_steps=8")
    assert script.events[2:6] == ["sink 8", "eval 8", "notified 8", "save 8"]
    assert list(script.saved) == [8, 16, 20]
