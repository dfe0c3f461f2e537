"""Calls of a run's callbacks, and the requests that callbacks make."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, replace
from functools import partial
from operator import index, methodcaller
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from pipeline.checkpoint.host_state import (
    MAX_DIGITS,
    MAX_RATE,
    CallbackState,
    RateChange,
    Requests,
)
from pipeline.core.errors import RunError, first_line, printable
from pipeline.core.files.bounded_read import parse_json
from pipeline.core.files.value_text import show
from pipeline.engine.callbacks.callback import Callback, Evaluation, RunControl
from pipeline.engine.schedule import RunSchedule
from pipeline.training.parallel.ranks import Agree, is_readable
from pipeline.training.telemetry import count_updates

if TYPE_CHECKING:
    from pipeline.training.component_specs import OptimizerRule, RateRule
    from pipeline.training.state import TrainState

STATE_DEPTH = 3
"""Number of JSON objects around the state of a callback in a checkpoint."""
_TOO_LONG = 10**MAX_DIGITS
"""Smallest integer of too many digits. To compute it for each integer of a state takes long."""
SETTING_EVENTS = ("on_begin", "on_sink", "on_eval")
"""Events at which parameters may be set."""


class CallbackError(RunError):
    """The failure of a callback that ends the run."""


class RunView(RunControl):
    """The run as callbacks see it, with the requests that they have made."""

    def __init__(
        self,
        run_dir: Path,
        run_schedule: RunSchedule,
        evaluate_state: Callable[[TrainState], Evaluation | None],
        *,
        resumed: bool = False,
        processes: int = 1,
    ) -> None:
        self.run_dir = run_dir
        self.resumed = resumed
        self._processes = processes
        self.total = self._most_steps = run_schedule.total
        self.steps_per_epoch = run_schedule.steps_per_epoch
        self.step = 0
        self.requests = Requests()
        """Requests since the last boundary."""
        self.scalars: dict[str, float | None] = {}
        self.state: TrainState | None = None
        self.event = "on_begin"
        """Newest event that callbacks were notified of."""
        self.new_params: Any = None
        """Parameters that replace the state's, as a tree; None if they don't change."""
        self.rates = np.zeros(0, np.float32)
        """Learning rates of the recipe, a row for each update."""
        self.granted_rates: tuple[RateChange, ...] = ()
        """Changes of the rates that are in effect."""
        self.flush: Callable[[], None] = lambda: None
        """Writes the logs up to the newest step."""
        self._evaluate_state = evaluate_state

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next update, with the changes that were requested so far."""
        updates = 0 if self.state is None else int(count_updates(self.state))
        update = min(updates, len(self.rates) - 1)
        changes = combine_changes((*self.granted_rates, *self.requests.rates))
        row = self.rates[update : update + 1]
        return float(change_rates(row, changes).flat[0])

    def stop(self, reason: str) -> None:
        reason = printable(str(reason))[:1000] or "it gave no reason"
        self.requests = replace(self.requests, stop=self.requests.stop or reason)

    def set_learning_rate(self, rate: float) -> None:
        change = RateChange(rate=_require_rate("learning rate", rate))
        self._request(rates=(*self.requests.rates, change))

    def scale_learning_rate(self, factor: float) -> None:
        change = RateChange(factor=_require_rate("factor", factor))
        self._request(rates=(*self.requests.rates, change))

    def evaluate_at(self, step: int) -> None:
        number = self._require_step(step, self.step + 1)
        self._request(evaluate_at=(*self.requests.evaluate_at, number))

    def save_at(self, step: int) -> None:
        # At these events, the boundary hasn't saved its checkpoint yet.
        least = self.step if self.event in ("on_sink", "on_eval") else self.step + 1
        self._request(save_at=(*self.requests.save_at, self._require_step(step, least)))

    def _request(self, **changes: Any) -> None:
        self._require_training()
        self.requests = replace(self.requests, **changes)

    def _require_training(self) -> None:
        if self.event == "on_end":
            raise ValueError("training has ended; nothing can be changed")

    def _require_step(self, step: int, least: int) -> int:
        """Return a step from `least` on as an int, also one that a deadline has cut off, which no
        callback can foresee. Raises ValueError for others."""
        self._require_training()
        try:
            number = index(step)
        except TypeError:
            number = -1
        if least > self.total:
            raise ValueError(f"step {show(step)}: the last step, {self.total}, is done")
        most = max(self.total, self._most_steps)
        if not least <= number <= most:
            raise ValueError(f"step {show(step)} must be a whole number from {least} to {most}")
        return number

    def evaluate(self) -> Evaluation:
        if self._processes > 1:
            raise ValueError("can't evaluate here in a run of several processes; use evaluate_at")
        if self.state is None:
            raise ValueError("there is nothing to evaluate before training has begun")
        state = self.state
        if self.new_params is not None:
            state = with_parameters(state, self.new_params)
        evaluation = self._evaluate_state(state)
        assert evaluation is not None, "no signal interrupts it"
        return evaluation

    def log(self, name: str, value: float) -> None:
        if not isinstance(name, str) or not name or name == "step":
            raise ValueError(f"{name!r} must be the name of a scalar, other than step")
        _require_readable(name)
        number = float(value)
        self.scalars[name] = number if math.isfinite(number) else None

    def parameters(self) -> dict[str, np.ndarray]:
        flat = flatten_dict(self._read_params(), sep="/")
        return {path: np.array(array) for path, array in flat.items()}

    def set_parameters(self, changed: Mapping[str, np.ndarray]) -> None:
        if self.event not in SETTING_EVENTS:
            raise ValueError("parameters can be set at the start, after a sink or an evaluation")
        if self._processes > 1:
            raise ValueError("parameters can't be set in a run of several processes")
        flat = dict(flatten_dict(self._read_params(), sep="/"))
        for path, array in changed.items():
            if path not in flat:
                raise ValueError(f"there is no parameter {path!r}; choose from {', '.join(flat)}")
            new = np.asarray(array)
            old = flat[path]
            if new.shape != old.shape:
                raise ValueError(f"{path}: has shape {new.shape}, must have {old.shape}")
            flat[path] = new.astype(old.dtype)
        self.new_params = unflatten_dict(flat, sep="/")

    def _read_params(self) -> Any:
        if self.state is None:
            raise ValueError("the parameters can be read once training has begun")
        if not all(map(is_readable, jax.tree.leaves(self.state.params))):
            raise ValueError("parameters can't be read if several processes share them")
        return self.state.params if self.new_params is None else self.new_params


def _require_rate(what: str, value: float) -> float:
    """Return a rate or a factor as a float. Raises ValueError if it is out of range."""
    value = float(value)
    if not 0 <= value <= MAX_RATE:
        raise ValueError(f"{what} {value} must be from 0 to {MAX_RATE:.4g}, float32's maximum")
    return value


class NoCallbacks:
    """The base of `Callbacks`, for a run without callbacks. Earlier requests stay in effect."""

    failure: CallbackError | None = None
    """First failure that ends the run."""

    def restore(self, state: CallbackState) -> None:
        """Do nothing."""

    def state(self, granted: Requests) -> CallbackState:
        """Return what a checkpoint stores: the requests that were granted."""
        return CallbackState(granted=granted)

    def notify(self, event: str, state: TrainState, step: int, *args: Any) -> None:
        """Do nothing."""

    def show_state(self, state: TrainState) -> None:
        """Do nothing."""

    def show_length(self, total: int) -> None:
        """Do nothing."""

    def show_rates(self, rates: np.ndarray, changes: tuple[RateChange, ...]) -> None:
        """Do nothing."""

    def take_requests(self, agree: Agree) -> Requests | None:
        """Return None: nothing is requested."""
        return None

    def take_parameters(self) -> Any:
        """Return None: no parameters are set."""
        return None

    def write_scalars(self) -> None:
        """Do nothing."""


class Callbacks(NoCallbacks):
    """The callbacks of a run, in their order."""

    def __init__(
        self,
        callbacks: Sequence[Callback],
        view: RunView,
        warn: Callable[[str], None],
        add_scalars: Callable[[int, Mapping[str, float | None]], None],
    ) -> None:
        self.view = view
        self._warn = warn
        self._add_scalars = add_scalars
        counts = Counter[str]()
        self._active: list[tuple[str, Callback]] = []
        """Key in checkpoints, and callback, of those that haven't failed with a warning."""
        for callback in callbacks:
            counts[callback.label] += 1
            self._active.append((f"{callback.label}-{counts[callback.label]}", callback))

    def restore(self, state: CallbackState) -> None:
        """Restore callbacks from a checkpoint. Raises CallbackError."""
        for key, callback in self._active:
            saved = state.states.get(key)
            if saved is not None:
                self._attempt(callback, "restore", partial(callback.restore, saved))
        if self.failure is not None:
            raise self.failure
        self.view.requests = state.asked
        self.view.scalars = dict(state.scalars)

    def state(self, granted: Requests) -> CallbackState:
        """Return what a checkpoint stores, without the states of callbacks that fail."""
        states: dict[str, Any] = {}
        for key, callback in self._active:
            state = self._attempt(callback, "state", partial(_read_state, callback))
            if state is not None:
                states[key] = state
        return CallbackState(states, granted, self.view.requests, self.view.scalars)

    def notify(self, event: str, state: TrainState, step: int, *args: Any) -> None:
        """Call the method `event` of all callbacks. A failure that ends the run sets `failure`."""
        self.view.state = state
        self.view.step = step
        self.view.event = event
        # A callback may change the arrays of its copies, while monitors write theirs.
        call = methodcaller(event, self.view, *deepcopy(args))
        for _, callback in self._active:
            self._attempt(callback, event, partial(call, callback))

    def show_state(self, state: TrainState) -> None:
        """Replace the state that callbacks see, after a callback has set parameters."""
        self.view.state = state

    def show_length(self, total: int) -> None:
        """Set the number of steps that callbacks see, after a deadline has changed it."""
        self.view.total = total

    def show_rates(self, rates: np.ndarray, changes: tuple[RateChange, ...]) -> None:
        """Set the recipe's learning rates that callbacks see, and the changes in effect."""
        self.view.rates = rates
        self.view.granted_rates = changes

    def take_requests(self, agree: Agree) -> Requests | None:
        """Return the first process's requests since the last call; None if it has none."""
        requests = self.view.requests
        self.view.requests = Requests()
        tree = agree(lambda: None if requests == Requests() else asdict(requests))
        return None if tree is None else Requests.from_json(tree)

    def take_parameters(self) -> Any:
        """Return the parameters that replace the state's; None if they don't change."""
        params, self.view.new_params = self.view.new_params, None
        return params

    def write_scalars(self) -> None:
        """Write the scalars of this boundary."""
        scalars = self.view.scalars
        self.view.scalars = {}
        if scalars:
            self._add_scalars(self.view.step, scalars)

    def _attempt(self, callback: Callback, what: str, call: Callable[[], Any]) -> Any:
        """Return the result of a call; None if it fails. A failure drops the callback if its
        `on_failure` is "warn", else sets `failure` if that isn't set."""
        try:
            return call()
        except (Exception, SystemExit) as error:
            problem = f"{type(error).__name__}: {first_line(error)}"
            text = f"callback {callback.label}, {what}: {problem}"
            if callback.on_failure == "warn":
                self._active = [entry for entry in self._active if entry[1] is not callback]
                self._warn(f"{text}; it isn't called any more")
            elif self.failure is None:
                self.failure = CallbackError(text)
                self.failure.__cause__ = error
        return None


def _read_state(callback: Callback) -> Any:
    """Return the state of a callback as JSON. Raises ValueError if it isn't JSON, or if a resumed
    run couldn't read it."""
    state = callback.state()
    try:
        _require_readable(state)
        text = json.dumps(state, allow_nan=False)
        # A checkpoint has the states in nested objects, which count for the depth.
        parse_json(f"{STATE_DEPTH * '['}{text}{STATE_DEPTH * ']'}")
        return json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{show(state)} isn't JSON: {first_line(error)}") from error


def _require_readable(state: Any) -> None:
    """Raise ValueError for a key that isn't a text, since JSON would convert it to a text, and for
    texts and integers that aren't read from a checkpoint as they are written."""
    if isinstance(state, dict):
        for key, value in state.items():
            if not isinstance(key, str):
                raise ValueError(f"key {show(key)} must be a text")
            _require_readable(key)
            _require_readable(value)
    elif isinstance(state, list | tuple):
        for value in state:
            _require_readable(value)
    elif isinstance(state, str):
        state.encode()  # raises for surrogates, which stand for bytes of names that aren't UTF-8
    elif isinstance(state, int) and abs(state) >= _TOO_LONG:
        raise ValueError(f"an integer has more than {MAX_DIGITS} digits")


def combine_changes(changes: Sequence[RateChange]) -> tuple[RateChange, ...]:
    """Return equivalent changes: a rate, a factor, or first a rate and then a factor."""
    combined: list[RateChange] = []
    for change in changes:
        if change.factor is None:
            combined = [change]
        elif combined and combined[-1].factor is not None:
            combined[-1] = RateChange(factor=min(combined[-1].factor * change.factor, MAX_RATE))
        else:
            combined.append(change)
    return tuple(combined)


def change_rates(
    rates: np.ndarray, changes: Sequence[RateChange], rules: Sequence[OptimizerRule | RateRule] = ()
) -> np.ndarray:
    """Return a table of learning rates, a row for each update, with changes applied in order.

    All rows are changed, also rows of past updates, since a rollback may repeat them. A factor
    multiplies all columns. A new rate replaces column 0, the main schedule. Column `i` after it is
    of `rules[i - 1]`: if the rule has a `main_factor`, it becomes the new rate times that factor.
    """
    for change in changes:
        if change.factor is None:
            rates = rates.copy()
            columns = rates.reshape(len(rates), -1)
            columns[:, 0] = change.rate
            for column, rule in enumerate(rules, start=1):
                if rule.main_factor is not None:
                    columns[:, column] = columns[:, 0] * np.float32(rule.main_factor)
        else:
            with np.errstate(over="ignore"):
                rates = rates * np.float32(change.factor)
    return rates


def with_parameters(state: TrainState, params: Any) -> TrainState:
    """Return the state as numpy arrays with new parameters; a moving average is unchanged."""
    return replace(jax.tree.map(np.asarray, state), params=params)
