"""This project as a contestant: the recipe's stages, and `train` repeated on one program.

A round is the training stage of a run: sampling, gathering from uint8 and normalising inside
the compiled step, the loop of sinks, and all telemetry of every step (metrics.jsonl, TensorBoard,
run.log), from opening these files to closing them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from benchmarks.contestant import Result
from benchmarks.tasks import Task
from pipeline import load_recipe
from pipeline.checkpoint.host_state import HostState
from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.resolved_settings import schedule_events
from pipeline.core.errors import RunError
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Monitor
from pipeline.engine.history import History
from pipeline.engine.hooks import Hooks
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.monitors.observers import open_observers
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.lower import lower
from pipeline.training.telemetry import Telemetry


class OursTraining:
    """A recipe, compiled once and trained round by round."""

    def __init__(self, task: Task) -> None:
        self._recipe = recipe = load_recipe(task.recipe, task.overrides)
        self._folder = task.folder / "runs"
        self._rounds = 0
        with _make_quiet_reporter() as reporter:
            self._backend = recipe.device.open(recipe.parallel)
            dataset = load_data(recipe, reporter)
            self._built = build(recipe, dataset, reporter)
            self._built = lower(recipe, dataset, self._built, self._backend, None, reporter)
            self._executable = compile_programs(
                recipe, dataset, self._built, self._backend, reporter
            )
        self._state = self._executable.init()
        self._history = History(0)
        leaves = jax.tree.leaves(self._built.state.params)
        self.sizes = tuple(sorted(leaf.size for leaf in leaves))
        _save_weights(task.weights, self._state.params)

    @property
    def program_text(self) -> str:
        """The compiled training loop, as XLA writes it."""
        return self._executable.program_text

    def run(self, steps: int) -> Result:
        """Train `steps` more steps, into a new run directory."""
        self._rounds += 1
        folder = self._folder / f"{self._rounds:04}"
        folder.mkdir(parents=True)
        recipe = self._recipe
        first = self._history.step
        run_schedule = replace(self._built.run_schedule, total=first + steps)
        mechanism, _ = self._backend.choose_mechanism(
            recipe.train.mechanism, sink=recipe.train.sink
        )
        tally = _Tally()
        settings = make_observer_settings(recipe)
        with (
            _make_quiet_reporter(folder) as reporter,
            open_observers(settings, folder, run_schedule, first, reporter) as observers,
        ):
            schedule = schedule_events(recipe, run_schedule)
            hooks = Hooks(monitors=(observers.monitor, tally))
            program = Program(self._executable, mechanism)
            training = train(program, self._state, schedule, hooks, HostState(), self._history)
            self._state = exhaust(training)
        if self._history.status != "done":
            raise RunError(self._history.reason or "stopped")
        return Result(float(np.mean(np.concatenate(tally.losses))), tally.seconds)


class _Tally(Monitor):
    """Adds up the seconds of dispatches, and collects the losses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.losses: list[np.ndarray] = []

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Record a dispatch."""
        self.seconds += seconds
        self.losses.append(np.array(telemetry.loss))


def enter(task: Task) -> OursTraining:
    """Compile the recipe and write its initial weights, with which the peers start too."""
    return OursTraining(task)


def _make_quiet_reporter(folder: Path | None = None) -> Reporter:
    return Reporter(folder, Console(file=open(os.devnull, "w"), soft_wrap=True))


def _save_weights(path: Path, params: Mapping[str, Any]) -> None:
    leaves = jax.tree.leaves_with_path(params)
    joined = {jax.tree_util.keystr(p, simple=True, separator="/"): np.array(x) for p, x in leaves}
    np.savez(path, allow_pickle=False, **joined)
