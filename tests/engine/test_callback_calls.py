from __future__ import annotations

import functools
import json
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from pipeline.backends.base import Mechanism
from pipeline.checkpoint.host_state import HostState, RateChange, Requests
from pipeline.checkpoint.restore import parse_host_state
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import schedule_events
from pipeline.core.errors import RunError
from pipeline.core.host.signals import Signals
from pipeline.engine.callback_calls import (
    CallbackError,
    Callbacks,
    NoCallbacks,
    RunView,
    change_rates,
    combine_changes,
)
from pipeline.engine.callbacks.callback import Callback, Evaluation, Monitor, RunControl, SinkReport
from pipeline.engine.history import History
from pipeline.engine.hooks import Deadline, Hooks, NoRollbacks, Rollbacks, Saves
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.schedule import RunSchedule, Schedule
from pipeline.training.component_specs import RateRule
from pipeline.training.features.non_finite_steps import NonFiniteStepCounts
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry
from tests.engine.monitors.test_monitors import EVALUATION
from tests.step_rows import telemetry_of

Compose = Callable[..., Recipe]
TOTAL = 24
SCHEDULE = np.linspace(0.5, 0.25, TOTAL, dtype=np.float32)
"""A learning rate for each update that differs from all others."""


def state_at(step: int, weight: Any = 1.0, *, undone: int | None = None) -> TrainState:
    """A network of one parameter, `layer/w`, float32 (2,)."""
    params = {"layer": {"w": np.full(2, weight, np.float32)}}
    counts = None if undone is None else NonFiniteStepCounts(np.int32(0), np.int32(undone))  # type: ignore[arg-type]
    parts = {} if counts is None else {"non_finite_steps": counts}
    return TrainState(np.int32(step), params, {}, (), parts)  # type: ignore[arg-type]


@dataclass
class World(Monitor):
    """What a run leaves, over all processes that work on it: a device, logs and checkpoints.

    A step multiplies the parameter by 1 minus its learning rate, and its loss is the parameter.
    """

    rates: np.ndarray = field(default_factory=SCHEDULE.copy)
    metrics: dict[int, tuple[float, float]] = field(default_factory=dict)
    evaluations: dict[int, float] = field(default_factory=dict)
    scalars: list[tuple[int, dict[str, float | None]]] = field(default_factory=list)
    saved: dict[int, tuple[TrainState, Any]] = field(default_factory=dict)
    saves: list[int] = field(default_factory=list)
    dispatched: list[int] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    signals: Signals = field(default_factory=Signals)
    stop_in_evaluation: int | None = None
    nan_step: int | None = None

    # The executable.

    def put(self, state: TrainState) -> TrainState:
        return state

    def set_learning_rates(self, rates: np.ndarray) -> None:
        assert rates.dtype == np.float32
        self.rates = rates

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        self.dispatched.append(stop - start)
        counts = state.features.get("non_finite_steps")
        undone = None if counts is None else int(counts.left_out)
        weight, rows = state.params["layer"]["w"][0], []
        for step in range(start + 1, stop + 1):
            rate = self.rates[step - 1 - (undone or 0)]
            loss = math.nan if step == self.nan_step else weight
            rows.append([loss, rate, 1.0, 1.0, 0.0])
            if step == self.nan_step:
                self.nan_step, stop = None, step - 1
                break
            weight = np.float32(weight * (1 - rate))
        return state_at(stop, weight, undone=undone), telemetry_of(start, np.array(rows))

    # A monitor.

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        for row in range(len(telemetry)):
            values = float(telemetry.loss[row]), float(telemetry.learning_rate[row])
            self.metrics[telemetry.start + row + 1] = values

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.evaluations[step] = evaluation.scalars()["loss"]

    def on_scalars(self, step: int, scalars: Mapping[str, float | None]) -> None:
        self.scalars.append((step, dict(scalars)))

    # Evaluations and checkpoints.

    def evaluate(self, state: TrainState) -> Evaluation | None:
        if self.stop_in_evaluation == int(state.step):
            self.signals.stop = "SIGTERM received"
            return None
        return self.evaluate_now(state)

    def evaluate_now(self, state: TrainState) -> Evaluation:
        loss = float(state.params["layer"]["w"].sum())
        return Evaluation({**EVALUATION.metrics, "loss": loss}, EVALUATION.confusion)

    def save(
        self,
        step: int,
        state: TrainState,
        host: Mapping[str, Any],
        metrics: Mapping[str, float] | None,
    ) -> None:
        assert int(state.step) == step
        self.saves.append(step)
        if step not in self.saved:
            self.saved[step] = state, json.loads(json.dumps(host))

    def outcome(self) -> Any:
        """Everything that must not depend on kills."""
        last = max(self.saved)
        state, host = self.saved[last]
        return (
            sorted(self.metrics.items()),
            sorted(self.evaluations.items()),
            self.scalars,
            (last, state.params["layer"]["w"].tolist(), host),
        )


@dataclass(frozen=True)
class Runner:
    """Trains in a world: 24 steps, 6 an epoch, sinks of 8."""

    tiny: Compose

    def __call__(
        self,
        world: World,
        *callbacks: Callback,
        recipe: Sequence[str] = (),
        resumed: bool = False,
        sink: int | None = 8,
        processes: int = 1,
        agree: Agree = decide_alone,
        rollbacks: Rollbacks | None = None,
        undone: int | None = None,
        monitors: Sequence[Monitor] = (),
        **changed: Any,
    ) -> History:
        """Run, from the newest checkpoint of the world where it is `resumed`."""
        schedule = RunSchedule(TOTAL, 6, sink)
        world.signals, world.rates = Signals(), SCHEDULE.copy()
        state, host = state_at(0, undone=undone), HostState()
        if resumed and world.saved:
            state, tree = world.saved[max(world.saved)]
            host = parse_host_state(tree)
        first = int(state.step)
        for log in (world.metrics, world.evaluations):
            for step in [step for step in log if step > first]:
                del log[step]  # type: ignore[attr-defined]
        if resumed:
            # As MetricsLog truncates its file.
            last = first if host.unfinished_boundary is None else first - 1
            world.scalars = [entry for entry in world.scalars if 0 < entry[0] <= last]
        about = Path("run"), schedule, world.evaluate_now
        view = RunView(*about, resumed=resumed, processes=processes)
        called = Callbacks(callbacks, view, world.warnings.append, world.on_scalars)
        composed = self.tiny("train.steps=24", "train.sink_size=8", *recipe)
        hooks = Hooks(
            monitors=[world, *monitors],
            evaluate=world.evaluate,
            saves=Saves(world, composed.checkpoint.every_seconds),
            callbacks=called if callbacks else NoCallbacks(),
            rollbacks=NoRollbacks() if rollbacks is None else rollbacks,
            on_non_finite_step=composed.train.on_nan.name,
            signals=world.signals,
            agree=agree,
            **changed,
        )
        program = Program(world, "loop", SCHEDULE)  # type: ignore[arg-type]
        events = schedule_events(composed, schedule)
        history = History(first)
        exhaust(train(program, state, events, hooks, host, history))
        return history


@pytest.fixture
def play(tiny: Compose) -> Runner:
    return Runner(tiny)


Act = Callable[[RunControl], Any]


class Actor(Callback):
    """Acts at given events of given steps, and notes what it is told in its state."""

    def __init__(self, acts: Mapping[tuple[str, int], Act] | None = None) -> None:
        self.acts = dict(acts or {})
        self.told: list[list[Any]] = []
        self.refused: list[str] = []

    def _note(self, event: str, run: RunControl, number: int) -> None:
        assert run.step == number
        if event not in ("on_begin", "on_end"):
            self.told.append([event, number])
        act = self.acts.get((event, number))
        if act is not None:
            act(run)

    def on_begin(self, run: RunControl) -> None:
        self._note("on_begin", run, run.step)

    def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
        assert run.step == telemetry.start + len(telemetry)
        steps = range(telemetry.start + 1, run.step + 1)
        self.told += [["step", step] for step in steps]

    def on_sink(self, run: RunControl, report: SinkReport) -> None:
        self._note("on_sink", run, report.step)

    def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
        self._note("on_eval", run, step)

    def on_checkpoint(self, run: RunControl, step: int) -> None:
        self._note("on_checkpoint", run, step)

    def on_end(self, run: RunControl, status: str) -> None:
        self._note("on_end", run, run.step)

    def state(self) -> Any:
        return self.told

    def restore(self, state: Any) -> None:
        self.told = list(state)


def test_callbacks_get_every_event_once_and_in_order(play: Runner) -> None:
    actor = Actor()
    play(World(), actor, recipe=["eval.every_steps=12", "checkpoint.every_steps=12"])
    events = [(event, step) for event, step in actor.told if event != "step"]
    assert events == [
        ("on_sink", 8),
        ("on_eval", 12),
        ("on_checkpoint", 12),
        ("on_sink", 16),
        ("on_sink", 24),
        ("on_eval", 24),
        ("on_checkpoint", 24),
    ]
    assert [step for event, step in actor.told if event == "step"] == list(range(1, 25))


def test_requested_events_happen_at_their_step(play: Runner) -> None:
    world = World()

    def ask(run: RunControl) -> None:
        for step in (3, 3, 17, TOTAL):
            run.evaluate_at(step)
        run.save_at(np.int64(10))  # type: ignore[arg-type]

    play(world, Actor({("on_begin", 0): ask, ("on_sink", 16): lambda run: run.save_at(run.step)}))
    assert sorted(world.evaluations) == [3, 17, 24]
    assert list(world.saved) == [10, 16, 24]


def test_learning_rate_applies_from_the_next_step(play: Runner) -> None:
    world = World()
    seen = []

    def act(run: RunControl) -> None:
        run.set_learning_rate(0.125)
        run.scale_learning_rate(0.5)
        seen.append(run.learning_rate)

    play(
        world, Actor({("on_sink", 8): act, ("on_sink", 16): lambda run: run.scale_learning_rate(2)})
    )
    rates = [rate for _, (_, rate) in sorted(world.metrics.items())]
    assert rates == [*SCHEDULE[:8].tolist(), *8 * [0.0625], *8 * [0.125]]
    assert seen == [0.0625]


@pytest.mark.parametrize("sink", [None, 1, 3, 24])
def test_changed_rates_do_not_depend_on_sink_size(sink: int | None, play: Runner) -> None:
    def losses(sink: int | None) -> dict[int, tuple[float, float]]:
        world = World()
        acts: dict[tuple[str, int], Act] = {
            ("on_eval", 6): lambda run: run.scale_learning_rate(0.3),
            ("on_eval", 18): lambda run: run.set_learning_rate(0.01),
        }
        play(world, Actor(acts), recipe=["eval.every_steps=6"], sink=sink)
        return world.metrics

    assert losses(sink) == losses(8)


def test_set_parameters_apply_from_their_boundary(play: Runner) -> None:
    world = World()

    def act(run: RunControl) -> None:
        copy = run.parameters()["layer/w"]
        copy[:] = 7  # a copy of one's own
        assert run.parameters()["layer/w"][0] < 1
        run.set_parameters({"layer/w": np.array([2, 2])})
        assert run.parameters()["layer/w"].tolist() == [2, 2]
        assert run.evaluate().scalars()["loss"] == 4

    play(world, Actor({("on_sink", 16): act}), recipe=["eval.every_steps=16"])
    assert world.metrics[17][0] == 2.0
    assert world.evaluations == {16: 4.0}


def test_evaluation_before_set_parameters_is_not_the_final_one(play: Runner) -> None:
    """The eval stage would report a network that is not the one that was saved."""

    def act(run: RunControl) -> None:
        run.set_parameters({"layer/w": np.zeros(2)})

    world = World()
    kept = play(world, Actor(), recipe=["eval.every_steps=24"])
    assert kept.evaluated.keys() == {24}
    changed = play(World(), Actor({("on_eval", 24): act}), recipe=["eval.every_steps=24"])
    assert changed.evaluated == {}


def refusals(play: Runner, where: tuple[str, int], *acts: Act) -> list[str]:
    """The messages of what callbacks may not ask for."""
    messages = []

    def try_each(run: RunControl) -> None:
        for act in acts:
            with pytest.raises(ValueError, match=r".") as caught:
                act(run)
            messages.append(str(caught.value))

    play(World(), Actor({where: try_each}))
    return messages


def test_impossible_requests_are_refused(play: Runner) -> None:
    most = "from 0 to 3.403e+38, float32's maximum"
    assert refusals(
        play,
        ("on_sink", 8),
        lambda run: run.evaluate_at(8),
        lambda run: run.save_at(7),
        lambda run: run.save_at(25),
        lambda run: run.save_at(9.0),  # type: ignore[arg-type]
        lambda run: run.set_learning_rate(-0.1),
        lambda run: run.set_learning_rate(math.nan),
        lambda run: run.scale_learning_rate(1e300),
        lambda run: run.set_parameters({"layer/v": np.zeros(2)}),
        lambda run: run.set_parameters({"layer/w": np.zeros(3)}),
        lambda run: run.log("step", 1.0),
        lambda run: run.log("", 1.0),
    ) == [
        "step 8 must be a whole number from 9 to 24",
        "step 7 must be a whole number from 8 to 24",
        "step 25 must be a whole number from 8 to 24",
        "step 9.0 must be a whole number from 8 to 24",
        f"learning rate -0.1 must be {most}",
        f"learning rate nan must be {most}",
        f"factor 1e+300 must be {most}",
        "there is no parameter 'layer/v'; choose from layer/w",
        "layer/w: has shape (3,), must have (2,)",
        "'step' must be the name of a scalar, other than step",
        "'' must be the name of a scalar, other than step",
    ]


def test_late_requests_are_refused_in_on_checkpoint(play: Runner) -> None:
    """Which would have been saved without it."""
    asked = refusals(
        play,
        ("on_checkpoint", 24),
        lambda run: run.set_parameters({"layer/w": np.zeros(2)}),
        lambda run: run.save_at(24),
    )
    assert asked == [
        "parameters can be set at the start, after a sink or an evaluation",
        "step 24: the last step, 24, is done",
    ]


def test_changes_are_refused_in_on_end(play: Runner) -> None:
    message = "training has ended; nothing can be changed"
    assert (
        refusals(
            play,
            ("on_end", 24),
            lambda run: run.save_at(24),
            lambda run: run.evaluate_at(24),
            lambda run: run.set_learning_rate(0.1),
        )
        == [message] * 3
    )


@pytest.mark.parametrize(("reason", "said"), [("good", "good"), ("", "it gave no reason")])
def test_stop_by_a_callback_ends_the_run_as_done(reason: str, said: str, play: Runner) -> None:
    world = World()

    def act(run: RunControl) -> None:
        run.stop(reason)
        run.stop("another")

    history = play(world, Actor({("on_sink", 8): act}))
    assert (history.step, history.status) == (8, "done")
    assert history.reason == f"a callback stopped it: {said}"
    assert list(world.saved) == [8]
    # Killed before its summary was written.
    assert play(world, Actor(), resumed=True).reason == history.reason


class Failing(Callback):
    """Fails at an event."""

    def __init__(self, event: str, error: BaseException, on_failure: Any = "end") -> None:
        self.on_failure, self._error, self.calls = on_failure, error, 0

        def fail(*_: Any) -> None:
            self.calls += 1
            raise error

        setattr(self, event, fail)


EVENTS = ["on_steps", "on_sink", "on_eval", "on_checkpoint", "state", "on_end"]


@pytest.mark.parametrize("event", EVENTS)
def test_failing_callback_ends_the_run_and_saves_the_state(event: str, play: Runner) -> None:
    world, other = World(), Actor()
    recipe = ["eval.every_steps=8", "checkpoint.every_steps=8"]
    with pytest.raises(CallbackError) as caught:
        play(world, Failing(event, KeyError("two\nlines")), other, recipe=recipe)
    assert str(caught.value) == f"callback Failing, {event}: KeyError: 'two\\nlines'"
    assert max(world.saved) == max(world.metrics)
    assert other.told[-1][1] == max(world.metrics)


@pytest.mark.parametrize("event", ["on_begin", *EVENTS])
def test_failing_callback_with_warn_is_not_called_again(event: str, play: Runner) -> None:
    world, other = World(), Actor()
    failing = Failing(event, ValueError("bad"), "warn")
    recipe = ["eval.every_steps=8", "checkpoint.every_steps=8"]
    assert play(world, failing, other, recipe=recipe).status == "done"
    problem = f"callback Failing, {event}: ValueError: bad"
    assert world.warnings == [f"{problem}; it isn't called any more"]
    assert failing.calls == 1
    assert len([event for event, _ in other.told if event == "step"]) == TOTAL


def test_callback_whose_event_is_not_a_method_is_a_failure(play: Runner) -> None:
    actor = Actor()
    actor.on_sink = None  # type: ignore[assignment, method-assign]
    world = World()
    with pytest.raises(CallbackError, match="callback Actor, on_sink: TypeError: 'NoneType'"):
        play(world, actor)
    assert list(world.saved) == [8]


def test_system_exit_in_a_callback_is_a_failure(play: Runner) -> None:
    world = World()
    with pytest.raises(CallbackError, match="callback Failing, on_sink: SystemExit: 0"):
        play(world, Failing("on_sink", SystemExit(0)))
    assert list(world.saved) == [8]


def test_ctrl_c_in_a_callback_ends_the_process(play: Runner) -> None:
    world = World()
    with pytest.raises(KeyboardInterrupt):
        play(world, Failing("on_eval", KeyboardInterrupt()), recipe=["eval.every_steps=8"])
    assert world.saved == {}


def test_failing_on_begin_saves_nothing(play: Runner) -> None:
    world = World()
    with pytest.raises(CallbackError, match="on_begin: RuntimeError: no"):
        play(world, Failing("on_begin", RuntimeError("no")))
    assert world.saved == {}


@pytest.mark.parametrize(
    ("state", "problem"),
    [
        ({1, 2}, "{1, 2} isn't JSON: Object of type set"),
        (math.nan, "nan isn't JSON: Out of range"),
        ({"a": [{1: 2}]}, "isn't JSON: key 1 must be a text"),
        (np.float32(1), "1.0 isn't JSON: Object of type float32"),
        (sys, "isn't JSON: Object of type module"),
        ([os.fsdecode(b"\xff")], "isn't JSON: .* surrogates not allowed"),
        ({os.fsdecode(b"\xff"): 1}, "isn't JSON: .* surrogates not allowed"),
        (10**308, "isn't JSON: an integer has more than 308 digits"),
        (functools.reduce(lambda inner, _: [inner], range(62), 0), "isn't JSON: is nested too"),
    ],
    ids=["set", "NaN", "keys", "numpy", "module", "bytes", "key of bytes", "integer", "deep"],
)
def test_callback_state_that_is_not_json_is_refused(state: Any, problem: str, play: Runner) -> None:
    actor = Actor()
    actor.state = lambda: state  # type: ignore[method-assign]
    with pytest.raises(CallbackError, match=problem):
        play(World(), actor)


def test_largest_callback_state_is_restored(play: Runner) -> None:
    world = World()
    deep = functools.reduce(lambda inner, _: [inner], range(61), 1 - 10**308)
    first = Actor()
    first.state = lambda: deep  # type: ignore[method-assign]
    play(world, first)
    second = Actor()
    restored: list[Any] = []
    second.restore = restored.append  # type: ignore[method-assign]
    play(world, second, resumed=True)
    assert restored == [deep]


def test_changes_of_telemetry_and_evaluations_stay_in_the_callback(play: Runner) -> None:
    class Changing(Callback):
        def on_steps(self, run: RunControl, telemetry: Telemetry) -> None:
            telemetry.loss[:] = 0

        def on_eval(self, run: RunControl, step: int, evaluation: Evaluation) -> None:
            evaluation.metrics.clear()  # type: ignore[attr-defined]

    class Keeping(Monitor):
        """Reads the events after the run, as a monitor in another thread may do."""

        def __init__(self) -> None:
            self.losses: list[np.ndarray] = []
            self.evaluations: list[Evaluation] = []

        def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
            self.losses.append(telemetry.loss)

        def on_eval(self, step: int, evaluation: Evaluation) -> None:
            self.evaluations.append(evaluation)

    monitor = Keeping()
    recipe = ("eval.every_steps=8",)
    history = play(World(), Changing(), recipe=recipe, monitors=[monitor])
    assert history.status == "done"
    assert all(losses.all() for losses in monitor.losses)
    assert all(evaluation.metrics for evaluation in monitor.evaluations)


def test_failing_restore_ends_the_run_before_training(play: Runner) -> None:
    world = World()
    play(world, Actor({("on_sink", 8): lambda run: run.stop("enough")}))
    actor = Actor()
    actor.restore = Failing("restore", ValueError("not mine")).restore  # type: ignore[method-assign]
    with pytest.raises(CallbackError, match="callback Actor, restore: ValueError: not mine"):
        play(world, actor, resumed=True)
    assert list(world.saved) == [8]


@dataclass
class Compared(Callback):
    """A callback with an equality of its own, and so without a hash."""

    count: int = 0

    def on_sink(self, run: RunControl, report: SinkReport) -> None:
        self.count += 1

    def state(self) -> Any:
        return self.count

    def restore(self, state: Any) -> None:
        self.count = state


def test_equal_callbacks_are_distinguished(play: Runner) -> None:
    world = World()
    play(world, Compared(), Compared(10))
    assert world.saved[24][1]["callbacks"]["states"] == {"Compared-1": 3, "Compared-2": 13}
    failing, other = Compared(), Compared()
    failing.on_failure = "warn"
    failing.on_sink = Failing("on_sink", ValueError(), "warn").on_sink  # type: ignore[method-assign]
    play(World(), other, failing)
    assert other.count == 3


def test_scalars_have_the_step_of_their_boundary(play: Runner) -> None:
    world = World()
    acts: dict[tuple[str, int], Act] = {
        ("on_begin", 0): lambda run: run.log("begin", 1),
        ("on_sink", 8): lambda run: run.log("a/b\nü", math.inf),
        ("on_eval", 8): lambda run: run.log("accuracy", 0.5),
        ("on_checkpoint", 8): lambda run: run.log("saved", 8),
        ("on_end", 24): lambda run: run.log("end", 24),
    }
    play(world, Actor(acts), recipe=["eval.every_steps=8", "checkpoint.every_steps=8"])
    assert world.scalars == [
        (0, {"begin": 1.0}),
        (8, {"a/b\nü": None, "accuracy": 0.5}),
        (16, {"saved": 8.0}),
        (24, {"end": 24.0}),
    ]


def test_scalars_of_a_pruned_run_are_written_at_its_end(play: Runner) -> None:
    world = World()
    acts: dict[tuple[str, int], Act] = {("on_end", 8): lambda run: run.log("end", 8)}
    history = play(world, Actor(acts), prune=lambda verdict: "poor" if world.metrics else None)
    assert (history.step, history.status) == (8, "pruned")
    assert world.scalars == [(8, {"end": 8.0})]


def test_total_follows_a_deadline(play: Runner) -> None:
    class Shortened(Deadline):
        def move_end(self, schedule: Schedule, step: int, dispatch_size: Any) -> Schedule:
            return replace(schedule, run=replace(schedule.run, total=16))

    world = World()
    totals: list[int] = []
    actor = Actor({("on_sink", 8): lambda run: (totals.append(run.total), run.save_at(24))})
    actor.acts["on_sink", 16] = lambda run: run.evaluate_at(17)
    with pytest.raises(RunError, match="step 17: the last step, 16, is done"):
        play(world, actor, deadline=Shortened())
    # The run can't reach step 24, which was its last until the deadline cut it off.
    assert totals == [16]


def test_set_parameters_survive_an_interrupted_evaluation(play: Runner) -> None:
    def actor() -> Actor:
        acts: dict[tuple[str, int], Act] = {
            ("on_sink", 16): lambda run: (
                run.set_parameters({"layer/w": np.full(2, 3.0)}),
                run.log("set", 3),
                run.stop("late"),
            ),
            ("on_eval", 16): lambda run: run.log("evaluated", 1),
        }
        return Actor(acts)

    recipe = ["eval.every_steps=16"]
    unbroken, world = World(), World(stop_in_evaluation=16)
    play(unbroken, actor(), recipe=recipe)
    history = play(world, actor(), recipe=recipe)
    assert (history.status, history.reason) == ("stopped", "SIGTERM received")
    world.stop_in_evaluation = None
    history = play(world, actor(), recipe=recipe, resumed=True)
    assert (history.status, history.reason) == ("done", "a callback stopped it: late")
    assert world.evaluations == unbroken.evaluations == {16: 6.0}
    assert world.scalars == unbroken.scalars == [(16, {"set": 3.0, "evaluated": 1.0})]
    assert world.metrics == unbroken.metrics


def test_granted_requests_apply_to_a_resumed_run_without_callbacks(play: Runner) -> None:
    """As after a loop over sinks in Python that set a rate and was left."""
    world = World()

    def act(run: RunControl) -> None:
        run.set_learning_rate(0.125)
        run.evaluate_at(20)
        run.save_at(run.step)

    interrupted = {("on_sink", 16): lambda run: Failing("x", KeyboardInterrupt()).x()}  # type: ignore[attr-defined]
    with pytest.raises(KeyboardInterrupt):
        play(world, Actor({("on_sink", 8): act, **interrupted}))
    for _ in range(2):
        play(world, resumed=True)
        rates = [rate for _, (_, rate) in sorted(world.metrics.items())]
        assert rates == [*SCHEDULE[:8].tolist(), *16 * [0.125]]
        assert list(world.evaluations) == [20]
        # Saved by the process without callbacks, and good for another one.
        world.saved = {24: world.saved[24]}


def test_callbacks_can_be_added_to_a_resumed_run(play: Runner) -> None:
    world, actor = World(), Actor()
    play(world, recipe=["checkpoint.every_steps=8"])
    del world.saved[24], world.saved[16]
    play(world, actor, recipe=["checkpoint.every_steps=8"], resumed=True)
    assert actor.told[:3] == [["step", 9], *[["step", step] for step in (10, 11)]]


def test_non_finite_step_that_ends_a_run_is_reported_at_the_end(play: Runner) -> None:
    world, actor = World(nan_step=11), Actor()
    with pytest.raises(RunError, match="Step 11 of 24"):
        play(world, actor)
    assert max(world.saved) == 10
    assert actor.told[-2:] == [["step", 10], ["on_checkpoint", 10]]
    resumed = Actor()
    play(world, resumed, resumed=True)
    assert [s for event, s in resumed.told if event == "step"] == list(range(1, 25))


@pytest.mark.medium
def test_rate_set_by_a_callback_applies_after_a_rollback(play: Runner) -> None:
    """Though the updates that are repeated had another one."""
    world, actor = World(), Actor({("on_sink", 16): lambda run: run.set_learning_rate(0.125)})
    seen: list[float] = []
    actor.acts[("on_sink", 24)] = lambda run: seen.append(run.learning_rate)
    rollbacks = Rollbacks(3, (12,), lambda: list(world.saved), lambda step, _: world.saved[step][0])
    world.nan_step = 18
    recipe = ["checkpoint.every_steps=12", "train.on_nan=rollback"]
    play(world, actor, recipe=recipe, rollbacks=rollbacks, undone=0)
    assert [(gone.step, gone.to) for gone in rollbacks.done] == [(18, 12)]
    assert [world.metrics[step][1] for step in range(17, 25)] == 8 * [0.125]
    assert [s for event, s in actor.told if event == "step"] == list(range(1, 25))
    assert seen == [0.125]


def test_processes_follow_the_requests_of_the_first(play: Runner) -> None:
    answers: list[str] = []

    def first(decide: Callable[[], Any]) -> Any:
        answers.append(json.dumps(decide()))
        return json.loads(answers[-1])

    def second(decide: Callable[[], Any]) -> Any:
        return json.loads(answers.pop(0))

    def act(run: RunControl) -> None:
        run.scale_learning_rate(0.1)
        run.evaluate_at(20)
        for refused in (run.evaluate, lambda: run.set_parameters({})):
            with pytest.raises(ValueError, match="several processes"):
                refused()

    one, other = World(), World()
    play(one, Actor({("on_sink", 8): act}), processes=2, agree=first)
    play(other, Callback(), processes=2, agree=second)
    assert answers == []
    assert other.metrics == one.metrics
    assert list(other.evaluations) == list(one.evaluations) == [20]


# The law: kills change nothing.

ACTS: dict[str, Callable[[RunControl, int], Any]] = {
    "set": lambda run, n: run.set_learning_rate(n / 32),
    "scale": lambda run, n: run.scale_learning_rate(n / 16),
    "evaluate": lambda run, n: run.evaluate_at(min(run.step + n, run.total)),
    "save": lambda run, n: run.save_at(min(run.step + n, run.total)),
    "log": lambda run, n: run.log(f"value {n % 3}", n),
    "weights": lambda run, n: run.set_parameters({"layer/w": np.full(2, n / 8)}),
}
places = st.tuples(st.sampled_from(["on_sink", "on_eval"]), st.sampled_from([4, 8, 10, 16, 20]))
acts = st.dictionaries(
    places, st.lists(st.tuples(st.sampled_from(sorted(ACTS)), st.integers(1, 20)), max_size=3)
)
kills = st.lists(
    st.tuples(
        st.sampled_from(["on_sink", "on_eval", "on_checkpoint", "in evaluation"]),
        st.sampled_from([4, 8, 10, 12, 16, 18, 20, 24]),
    ),
    max_size=4,
)


class Killed(BaseException):
    """The process is gone."""


def _acting(acts: Mapping[tuple[str, int], Sequence[tuple[str, int]]]) -> Actor:
    def make(asked: Sequence[tuple[str, int]]) -> Act:
        return lambda run: [ACTS[name](run, number) for name, number in asked]

    return Actor({where: make(asked) for where, asked in acts.items()})


def _killing(where: tuple[str, int]) -> Actor:
    def die(run: RunControl) -> None:
        raise Killed

    return Actor({where: die})


@pytest.mark.slow
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(acts, kills, st.sampled_from([None, 8]))
@example(
    {("on_sink", 8): [("weights", 4), ("log", 1)], ("on_eval", 8): [("save", 5), ("set", 3)]},
    [("in evaluation", 8), ("on_checkpoint", 13), ("on_eval", 16)],
    8,
)
@example({("on_sink", 8): [("log", 1)]}, [("in evaluation", 8), ("on_checkpoint", 10)], 8)
def test_callbacks_after_kills_equal_an_unbroken_run(
    play: Runner,
    acts: Mapping[tuple[str, int], Sequence[tuple[str, int]]],
    kills: Sequence[tuple[str, int]],
    sink: int | None,
) -> None:
    recipe = ["eval.every_steps=4", "checkpoint.every_steps=10"]
    unbroken, whole = World(), _acting(acts)
    play(unbroken, whole, recipe=recipe, sink=sink)
    world = World()
    for life, (event, step) in enumerate([*kills, ("never", 0)]):
        world.stop_in_evaluation = step if event == "in evaluation" else None
        acting, killing = _acting(acts), _killing((event, step))
        try:
            # Killed first or last of those who are told.
            both = (acting, killing) if life % 2 else (killing, acting)
            play(world, *both, recipe=recipe, sink=sink, resumed=life > 0)
        except Killed:
            continue
    # A run that is stopped saves where it stops.
    stopped = any(event == "in evaluation" for event, _ in kills)
    compared = [
        [entry for entry in told if not (stopped and entry[0] == "on_checkpoint")]
        for told in (acting.told, whole.told)
    ]
    assert compared[0] == compared[1]
    assert [s for event, s in whole.told if event == "step"] == list(range(1, TOTAL + 1))
    mine, theirs = world.outcome(), unbroken.outcome()
    assert mine[:3] == theirs[:3]
    assert mine[3][:2] == theirs[3][:2]


# Changes of rates.

changes = st.lists(
    st.one_of(
        st.integers(0, 8).map(lambda n: RateChange(rate=n / 8)),
        st.sampled_from([0.25, 0.5, 1.0, 2.0, 4.0]).map(lambda f: RateChange(factor=f)),
    ),
    max_size=8,
)


@pytest.mark.medium
@given(changes)
def test_rate_changes_are_combined_into_one_rate_and_one_factor(changes: list[RateChange]) -> None:
    """Exactly so where factors are powers of two, which round nothing."""
    combined = combine_changes(changes)
    assert [change.factor is None for change in combined] in ([], [True], [False], [True, False])
    rate = SCHEDULE
    for change in changes:
        rate = SCHEDULE * 0 + change.rate if change.rate is not None else rate * change.factor
    np.testing.assert_array_equal(change_rates(SCHEDULE, combined), np.float32(rate))
    assert change_rates(SCHEDULE, combined).dtype == np.float32


def test_combined_factor_is_finite() -> None:
    combined = combine_changes(100 * [RateChange(factor=1e38)])
    assert parse_host_state({"callbacks": {"granted": {"rates": [asdict(combined[0])]}}})


@pytest.mark.parametrize(
    "change",
    [{}, {"rate": 0.1, "factor": 0.5}, {"rate": -1.0}, {"factor": 1e39}, {"rate": "0.1"}],
    ids=str,
)
def test_invalid_rate_change_in_host_state_is_refused(change: Mapping[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"callbacks\.granted\.rates\.0"):
        parse_host_state({"callbacks": {"granted": {"rates": [change]}}})


def test_invalid_stored_requests_are_ignored(play: Runner) -> None:
    """Steps that are done, doubled, out of order or beyond the end are no events."""
    world, wild = World(), [99, 3, 2**31 - 1, 20, 20, *range(1000, 3000), 5, 0]
    play(world, Actor({("on_sink", 8): lambda run: run.stop("saved")}))
    host = world.saved[8][1]
    host["callbacks"]["granted"] = {"evaluate_at": wild, "save_at": wild, "rates": [{"rate": 0.5}]}
    host["callbacks"]["asked"] = asdict(Requests(evaluate_at=(1, 21, 5000)))
    host["callbacks"]["scalars"] = {"x": 1e308}
    assert play(world, Actor(), resumed=True).status == "done"
    assert sorted(world.evaluations) == [20, 21]
    assert world.metrics[24][1] == 0.5


def test_view_is_unavailable_until_its_state_is_set() -> None:
    state = replace(state_at(3), params={})
    view = RunView(Path("run"), RunSchedule(4, 2, 2), lambda _: EVALUATION)
    with pytest.raises(ValueError, match="once training has begun"):
        view.parameters()
    with pytest.raises(ValueError, match="nothing to evaluate before training"):
        view.evaluate()
    view.state = state
    assert view.parameters() == {}


def test_set_rate_applies_to_rules_without_a_schedule() -> None:
    own = RateRule.model_validate({"pattern": "b", "factor": 0.5, "schedule": "cosine"})
    rules = [RateRule(pattern="a", factor=0.5), own]
    rates = np.array([[1.0, 0.5, 7.0], [0.8, 0.4, 7.0]], np.float32)
    table = change_rates(rates, [RateChange(rate=0.2), RateChange(factor=0.5)], rules)
    np.testing.assert_allclose(table, [[0.1, 0.05, 3.5]] * 2)
    np.testing.assert_array_equal(rates[0], [1.0, 0.5, 7.0])
