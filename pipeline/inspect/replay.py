"""A run opened at a step: the nearest checkpoint, replayed by the program that the run compiled.

The trip count of a training loop is an argument, so the same machine code runs to any step. Every
replayed step, and the step after the last one, is compared with metrics.jsonl. If a bit differs,
the state isn't the run's: the replay ends, or goes on as an approximation that is marked. Then a
message names the promise that is gone: what must be as it was in the run, and has changed since.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.backends.base import Executable
from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps, make_checkpoint_path
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import arrange_arrays, read_checkpoint
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.name_text import show_name
from pipeline.core.files.tree_diff import find_value
from pipeline.core.files.value_text import count_noun, format_duration, join_first, show
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.monitors.log_lines import METRICS, LogLine, last_step, read_lines
from pipeline.engine.schedule import DispatchSize
from pipeline.inspect.dumps.opened_recipe import (
    OpenedRecipe,
    make_silent_reporter,
    open_run_recipe,
    place_as_planned,
)
from pipeline.stages.build import fingerprint_rate_files
from pipeline.stages.compile import MACHINE_KEYS, CompileOptions, compile_programs
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.record.continuity import (
    FORK,
    compare_settings,
    describe_changed_software,
    find_changed_data,
    find_changed_plugins,
)
from pipeline.stages.record.provenance import describe_process, fingerprint_columns, read_provenance
from pipeline.stages.record.run_directory import PLAN, RECIPE, describe_missing_run, read_outcome
from pipeline.stages.record.run_record import find_discrepancy
from pipeline.stages.record.summary import list_versions
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry

MAX_NAMED = 10
"""Most checkpoints, and most causes, that a message lists."""
DISPATCH_S = 1.0
"""Longest time of a dispatch in seconds: Ctrl-C takes effect at its end."""
APPROXIMATE = "--approximate"
ADVICE = f"; {APPROXIMATE} goes on and marks every figure"
BATCH_DATA = ("train", "learning rates")
"""Data in provenance.json that decide steps; the evaluation's data don't."""


def mark(lost: Sequence[str], text: str) -> str:
    """Return a line with figures, which begins with "approximate" if promises are gone."""
    return f"approximate: {text}" if lost else text


@dataclass(frozen=True, eq=False)
class RunAtStep:
    """A run with the state that it had after `step` steps, in numpy."""

    opened: OpenedRecipe
    step: int
    state: TrainState
    lost: tuple[str, ...] = ()
    """Promises that are gone, so that figures are approximate; empty: the bits are the run's."""


def open_at(
    run_dir: Path, step: int, reporter: Reporter, *, approximate: bool = False
) -> RunAtStep:
    """Open a run at a step. Raises the errors of `open_replay` and `Replay.go_to`."""
    with open_replay(run_dir, reporter, approximate=approximate) as replay:
        state = replay.go_to(step)
    return RunAtStep(replay.opened, step, state, tuple(replay.lost))


@contextmanager
def open_replay(
    run_dir: Path, reporter: Reporter, *, approximate: bool = False, advice: str = ADVICE
) -> Iterator[Replay]:
    """Yield the replay of a run, whose data are those that it was trained on.

    Raises DataError if the folder isn't a run, or its data are gone or, unless `approximate`,
    changed; RecipeError if its recipe isn't valid any more.
    """
    if not (run_dir / RECIPE).is_file():
        raise DataError(describe_missing_run(run_dir))
    find_last_step(run_dir)  # raises the error of a run without steps
    opened = open_run_recipe(run_dir)
    with Replay(opened, run_dir, reporter, approximate, advice) as replay:
        replay.require_data()
        yield replay


def find_last_step(run_dir: Path) -> int:
    """Return the last step that a run has done, by its log and its checkpoints. Raises DataError if
    it has none."""
    logged = last_step(run_dir / METRICS)
    steps = [*list_saved_steps(run_dir / FOLDER), *([] if logged is None else [logged])]
    if not steps:
        raise DataError(
            f"{run_dir}: has no checkpoints, so no step can be computed, and no steps in {METRICS} "
            "that a replay from the start could be compared with"
        )
    return max(steps)


@dataclass(eq=False)
class Replay:
    """The states of a run, each by the shortest way: a checkpoint, or the steps after one.

    Files of the run are only read. Programs are compiled if steps must be replayed.
    """

    opened: OpenedRecipe
    run_dir: Path
    reporter: Reporter
    approximate: bool = False
    advice: str = ADVICE
    """Ending of messages, about approximations."""
    lost: list[str] = field(default_factory=list)
    """Promises that are gone, so that figures are approximate."""
    _executable: Executable | None = None
    _reached: tuple[int, TrainState] | None = None
    """Step and state of the last call of `go_to`."""

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        if self._executable is not None:
            self._executable.loader.close()

    def require_steps(self, steps: Sequence[int], least: int = 0) -> None:
        """Raise DataError for a step before `least` or after the last step of the run."""
        end = find_last_step(self.run_dir)
        for step in steps:
            if not least <= step <= end:
                rule = f"must be from {least} to {end}, the last step that the run has done"
                raise DataError(f"{self.run_dir}: step {step}: {rule}")

    def require_data(self) -> None:
        """Raise DataError, or give up, if the run's training data have changed."""
        change = describe_changed_data(self.opened, self.run_dir)
        if change is not None:
            self.give_up(DataError(f"{self.run_dir}: {change}{self.advice}"), change)

    def give_up(self, error: DataError | RunError, promise: str) -> None:
        """Raise `error`; if an approximation will do, warn that the promise is gone instead."""
        if not self.approximate:
            raise error
        if promise not in self.lost:
            self.lost.append(promise)
            self.reporter.warn(f"approximate from here: {promise}")

    def go_to(self, step: int) -> TrainState:
        """Return the state of the run after `step` steps, in numpy.

        It is read from a checkpoint, or replayed from the nearest one before, or from the start.
        Raises DataError for a step that the run hasn't done, RunError if the bits can't be had.
        """
        self.require_steps([step])
        if self._reached is not None and self._reached[0] == step:
            return self._reached[1]
        start, state = self._find_nearest(step)
        if start == step and step > 0:
            self._reached = step, state
            return state
        self._require_log(step)
        state = self._replay(state, start, step)
        self._reached = step, state
        return state

    def compute_step(self, step: int) -> Telemetry:
        """Return the record of `step`, counted from 1, computed again from the state before it.

        The numbers are compared with the run's. Raises the errors of `go_to`.
        """
        self.require_steps([step], least=1)
        self._require_log(step)
        state = self.go_to(step - 1)
        executable = self._compile()
        _, record = executable.run(executable.put(state), step - 1, step, "loop")
        self._check(step - 1, find_discrepancy(islice(self._read_log(step - 1), 1), record))
        return record

    def _require_log(self, step: int) -> None:
        """Raise RunError, or give up, without a log that a replayed step could be compared with."""
        if not (self.run_dir / METRICS).exists():
            promise = f"{METRICS} is missing, so nothing shows that its bits are the run's"
            self.give_up(self._make_error(step, promise), promise)

    def _find_nearest(self, step: int) -> tuple[int, TrainState]:
        """Return the last state up to a step that needs no replay, and its step."""
        root = self.run_dir / FOLDER
        reached = self._reached
        saved_steps = [saved for saved in list_saved_steps(root) if saved <= step]
        for saved_step in reversed(saved_steps):
            if reached is not None and saved_step <= reached[0] <= step:
                return reached
            try:
                checkpoint = read_checkpoint(make_checkpoint_path(root, saved_step))
            except DamagedError as error:
                self.reporter.warn(f"{error}; reading an earlier one")
                continue
            built = self.opened.built
            like = built.step_config.select_saved(built.state)
            state = arrange_arrays(checkpoint.folder, checkpoint.arrays, like)
            return saved_step, self.opened.complete_state(state, self.run_dir)
        if reached is not None and reached[0] <= step:
            return reached
        return 0, jax.tree.map(np.array, self.opened.fresh_state())

    def _replay(self, state: TrainState, start: int, step: int) -> TrainState:
        """Run steps `start` + 1 to `step` again, and one more to compare the last state."""
        self._announce(start, step)
        executable = self._compile()
        lines = self._read_log(start)
        end = find_last_step(self.run_dir)
        current = state
        with self.reporter.clock(f"replaying steps {start + 1} to {step}"):
            for reached, steps in self.run_steps(state, start, step):
                current = reached
                self._check(step, find_discrepancy(islice(lines, len(steps)), steps))
                failed = steps.non_finite_step
                if failed is not None:
                    rule = f"must be from 0 to {failed - 1}"
                    problem = f"step {failed} isn't finite, and training ended before its update"
                    raise DataError(f"{self.run_dir}: step {step}: {rule}; {problem}")
        replayed: TrainState = jax.tree.map(np.array, current)
        if step < min(end, self.opened.built.run_schedule.total):
            _, steps = executable.run(executable.put(current), step, step + 1, "loop")
            if len(steps):
                self._check(step, find_discrepancy(islice(lines, 1), steps))
        if step > start:
            text = f"of step {start}; {count_noun(step - start, 'step')} trained again"
            checked = "" if self.lost else ", with the numbers of the run to the bit"
            self.reporter.print_stage("state", f"{text}{checked}")
        return replayed

    def run_steps(
        self, state: TrainState, start: int, stop: int
    ) -> Iterator[tuple[TrainState, Telemetry]]:
        """Run the steps start + 1 to stop from a state, and yield the state, on the device, and the
        records of each dispatch. Nothing is compared. Ends early after a non-finite step."""
        executable = self._compile()
        size = DispatchSize(DISPATCH_S)
        current = executable.put(state)
        position = start
        while position < stop:
            next_stop = min(stop, position + size.max_steps)
            began_at = time.perf_counter()
            current, steps = executable.run(current, position, next_stop, "loop")
            size.record(next_stop - position, time.perf_counter() - began_at)
            yield current, steps
            if steps.non_finite_step is not None:
                return
            position = next_stop

    def evaluate(self, state: TrainState) -> Evaluation:
        """Evaluate a state as the run does at its end."""
        opened = self.opened
        options = EvalOptions(
            DISPATCH_S, opened.built.step_config.metrics, on_train=opened.recipe.eval.on_train
        )
        executable = self._compile()
        evaluation = evaluate(executable, executable.put(state), opened.dataset, options)
        assert evaluation is not None, "nothing stops it"
        return evaluation

    def _announce(self, start: int, step: int) -> None:
        """Print how many steps are replayed, and how long they took in the run."""
        if start == step:
            return
        place = "the start" if start == 0 else f"the checkpoint of step {start:,}"
        text = f"{count_noun(step - start, 'step')} from {place}"
        step_ms = read_step_ms(self.run_dir)
        if step_ms is not None:
            text += f", {format_duration((step - start) * step_ms / 1000)} by the run's times"
        self.reporter.print_stage("replay", f"{text}, after compiling")

    def _compile(self) -> Executable:
        if self._executable is None:
            plan = self.run_dir / PLAN
            opened = place_as_planned(self.opened, plan, make_silent_reporter())
            # No evaluation is due, so its program isn't compiled.
            options = CompileOptions(evaluates_later=opened.recipe.parallel.mode == "none")
            with self.reporter.clock("compiling the run's program"):
                self._executable = compile_programs(
                    opened.recipe,
                    opened.dataset,
                    opened.built,
                    opened.backend,
                    make_silent_reporter(),
                    options,
                )
        return self._executable

    def _read_log(self, start: int) -> Iterator[LogLine]:
        """Yield the lines of the run's log after a step; none without a log."""
        log = self.run_dir / METRICS
        if log.exists():
            yield from (line for line in read_lines(log) if line.step > start)

    def _check(self, step: int, discrepancy: object | None) -> None:
        """Give up if a replayed step differs from the log, unless a promise is gone already."""
        if discrepancy is None or self.lost:
            return
        problem = f"the run and the steps trained again differ ({discrepancy})"
        causes = list_changed_causes(self.opened, self.run_dir)
        reason = join_first(causes, MAX_NAMED) if causes else "nothing that it recorded"
        promise = f"{problem}; changed since the run: {reason}"
        self.give_up(self._make_error(step, promise), promise)

    def _make_error(self, step: int, problem: str) -> RunError:
        saved = list_saved_steps(self.run_dir / FOLDER)
        names = join_first(list(map(str, saved)), MAX_NAMED) or "none"
        text = f"{self.run_dir}: the state after step {step:,} can't be computed: {problem}"
        return RunError(f"{text}; checkpoints are of the steps {names}{self.advice}")


def replay_state(opened: OpenedRecipe, run_dir: Path, step: int, reporter: Reporter) -> TrainState:
    """Return the state of a run, whose recipe is open, after `step` steps, in numpy.

    The data may differ from the run's. Raises the errors of `Replay.go_to`.
    """
    with Replay(opened, run_dir, reporter, advice="") as replay:
        return replay.go_to(step)


def describe_changed_data(opened: OpenedRecipe, run_dir: Path) -> str | None:
    """Describe what differs between the run's training data and the data now; None if equal.

    Runs whose provenance is gone are trusted. Raises DataError if provenance.json is damaged or a
    sample can't be read.
    """
    recipe = opened.recipe
    recorded = [
        {**process, "data": {name: data[name] for name in BATCH_DATA if name in data}}
        for process in read_provenance(run_dir)
        if isinstance(data := process.get("data"), Mapping)
    ]
    current: dict[str, Any] = {"train": _as_trees(fingerprint_columns(opened.dataset.train))}
    if rate_files := fingerprint_rate_files(recipe.train):
        current["learning rates"] = rate_files
    changes = find_changed_data(recorded, current)
    if not changes:
        return None
    files = [f"dataset.{key} = {path}" for key, path in _iterate_paths(recipe.dataset.model_dump())]
    names = f" ({', '.join(files)})" if files else ""
    return f"the data have changed since the run was trained{names}: {'; '.join(changes)}"


def _as_trees(fingerprints: Mapping[str, Any]) -> dict[str, Any]:
    return {column: vars(fingerprint) for column, fingerprint in fingerprints.items()}


def _iterate_paths(value: Any, key: str = "") -> Iterator[tuple[str, Path]]:
    """Yield the paths in a section of a recipe with their keys."""
    if isinstance(value, Path):
        yield key, value
    entries: Any = ()
    if isinstance(value, Mapping):
        entries = value.items()
    elif isinstance(value, list | tuple):
        entries = enumerate(value)
    for name, entry in entries:
        yield from _iterate_paths(entry, f"{key}.{name}" if key else str(name))


def list_changed_causes(opened: OpenedRecipe, run_dir: Path) -> list[str]:
    """List what may make a replay round differently than the run did, each with both values.

    These are changes of the environment, and what a run does that a replay doesn't: callbacks,
    rollbacks and the schedule before a resume with another length.
    """
    causes = [*list_changed_environment(opened, run_dir), *list_unrepeated_parts(run_dir)]
    if opened.recipe.train.callbacks:
        causes.append("its callbacks aren't called")
    return causes


def list_changed_environment(opened: OpenedRecipe, run_dir: Path) -> list[str]:
    """List changed versions and code, machine, settings and plug-ins, each with both values."""
    backend = opened.backend
    versions = list_versions(backend.describe())
    current = describe_process(opened.recipe.seed, versions, backend.device, {})
    causes = []
    processes = _read_processes(run_dir)
    if not processes:
        causes.append("its provenance.json is gone or damaged")
    if software := describe_changed_software(processes, current):
        causes.append(f"other software ({software})")
    machine = processes[0].get("machine") if processes else None
    if isinstance(machine, Mapping):
        causes += [
            f"another {name} ({show_name(str(machine[name]))} -> {current.machine[name]})"
            for name in MACHINE_KEYS
            if name in machine and machine[name] != current.machine[name]
        ]
    causes += [f"another setting ({line})" for line in compare_settings(processes, current)[0]]
    causes += [f"another plug-in ({line})" for line in find_changed_plugins(processes, current)]
    return causes


def list_unrepeated_parts(run_dir: Path) -> list[str]:
    """List a run's fork, resume and rollback, whose steps the recipe alone doesn't repeat."""
    causes = []
    processes = _read_processes(run_dir)
    forks = [process[FORK] for process in processes if isinstance(process.get(FORK), Mapping)]
    if forks:
        origin = show_name(str(forks[-1].get("run")))
        step = show(forks[-1].get("step"))
        causes.append(f"it is a fork, whose steps up to {step} are those of {origin}")
    elif len(processes) > 1:
        causes.append("the run was resumed, perhaps with another length")
    if find_value(read_outcome(run_dir), ("bad_steps", "rollbacks")):
        causes.append("it went back after a non-finite step")
    return causes


def _read_processes(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Return the processes of a run's provenance; none if it is gone or damaged."""
    try:
        return read_provenance(run_dir)
    except DataError:
        return []


def read_step_ms(run_dir: Path) -> float | None:
    """Return the milliseconds of a step of the run; None if it was killed."""
    value = find_value(read_outcome(run_dir), ("time", "step_ms"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number else None
