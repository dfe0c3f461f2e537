"""Inputs of a run: its options, services, compiled programs and inspection.

A subclass of `Inspection` adds profiles, dumps and the autopsy of a non-finite step.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.files.folder_lock import Lock
from pipeline.core.host.signals import Signals
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.engine.callbacks.callback import Callback
from pipeline.engine.callbacks.events import Monitor, Pruner
from pipeline.engine.deadline import Deadline, MovableEnd
from pipeline.engine.hooks import examine_nothing
from pipeline.engine.non_finite_step import Examination
from pipeline.stages.build import Built
from pipeline.stages.record.provenance import Provenance
from pipeline.stages.record.run_directory import RunFolder
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.resume_command import HowToResume, make_resume_overrides
from pipeline.training.parallel.ranks import Ranks
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class Profile:
    """The profile of a run; this class has no profiler."""

    run: CompiledRun
    """The run to train. A profiler traces its executable, and may shorten its schedule."""

    def open(self) -> AbstractContextManager[None]:
        """Profile the training in the body."""
        return nullcontext()

    def conclude(self, estimate: Estimate | None, state: TrainState) -> None:
        """Write the profile once training has ended with `state`."""


class Dumps(Monitor, ABC):
    """The dumps of a run."""

    @property
    @abstractmethod
    def steps(self) -> tuple[int, ...]:
        """Numbers of steps after which there is a dump."""

    @abstractmethod
    def __call__(self, state: TrainState, step: int) -> None:
        """Dump the next step from the state after `step` steps, without changing the state."""


Examine = Callable[[TrainState, int], Examination]
"""(state before a non-finite step, number of steps done) -> findings about the step."""


class Inspection:
    """Profile, dumps and autopsy of a run. This class has none, and refuses profiles and dumps."""

    def shorten(self, context: RunContext, built: Built, backend: Backend) -> Built:
        """Return `built`, with a shorter schedule if the run ends after its profile.

        Raises RecipeError if the run can't be profiled.
        """
        mode = context.recipe.profile.mode
        if mode != "off":
            raise RecipeError(f"profile.mode = {mode}: must be off; this run has no profiler")
        return built

    def open_profile(self, run: CompiledRun, total_steps: int, done: int) -> Profile:
        """Return the profile of the steps after the first `done`.

        `total_steps` is the run's length before `shorten`. Raises RecipeError if it is too short.
        """
        return Profile(run)

    def open_dumps(self, run: CompiledRun) -> Dumps | None:
        """Return the dumps of a run; None without any. Raises RecipeError if one can't be made."""
        steps = run.context.recipe.dump.steps
        if steps is not None:
            raise RecipeError(f"dump.steps = {steps}: must be null; this run has no dumps")
        return None

    def open_autopsy(self, run: CompiledRun) -> Examine:
        """Return the function that examines a non-finite step, if that ends the run."""
        return examine_nothing

    def archive(self, run_dir: Path) -> Path | None:
        """Archive the findings of the earlier run; return their folder, None without any."""
        return None


@dataclass(frozen=True)
class RunOptions:
    """Options of a run that aren't part of its recipe."""

    run_dir: Path | None = None
    """Directory of a new run; None makes one under `outputs/`."""
    recipe_folder: Path | None = None
    """Folder of the recipe file, which may hold the recorded reference; None without a file."""
    changed: Mapping[str, Any] = field(default_factory=dict)
    """Values of the keys that differ between the runs of a sweep, by key."""
    started_at: float = field(default_factory=time.perf_counter)
    """Start of the command, by `time.perf_counter`."""
    pruner: Pruner | None = None
    """Pruner that may end training at a boundary."""
    signals: Signals = field(default_factory=Signals)
    """Signals of the run. Those that come too late to stop the run are left to the caller."""
    how_to_resume: HowToResume = make_resume_overrides
    """Function that returns the command to print if the run ends early."""
    callbacks: Sequence[Callback] = ()
    """Callbacks that are called after the recipe's callbacks."""
    programs: OpenPrograms | None = None
    """Function in place of `lower_and_compile`, if several runs share a program."""
    inspection: Inspection = field(default_factory=Inspection)
    console: Console | None = None
    """Console for the lines of the run; None for standard output."""


@dataclass(frozen=True)
class RunContext:
    """Recipe, directory and services of one run."""

    recipe: Recipe
    options: RunOptions
    folder: RunFolder
    reporter: Reporter
    summary: Summary
    lock: Lock | None = None
    """Lock on the directory against other processes."""
    deadline: Deadline | MovableEnd = field(default_factory=Deadline)
    process: Provenance | None = None
    """Provenance of the first process, once its data are read; None in other processes."""

    @property
    def run_dir(self) -> Path:
        return self.folder.path

    @property
    def resuming(self) -> bool:
        return self.folder.resuming

    @property
    def ranks(self) -> Ranks:
        return self.folder.ranks

    @property
    def shows_pictures(self) -> bool:
        """Whether this process writes pictures for TensorBoard."""
        return self.recipe.monitor.tensorboard and self.ranks.is_first

    def poll_signals(self) -> None:
        """Raise Interrupted after a signal to stop. Several processes agree first, elsewhere."""
        if self.ranks.size == 1:
            self.options.signals.check()


@dataclass(frozen=True)
class CompiledRun:
    """A run with its data, its step lowered for a device, and the compiled programs."""

    context: RunContext
    dataset: Dataset
    built: Built
    backend: Backend
    executable: Executable


OpenPrograms = Callable[[RunContext, Recipe, Dataset, Built, Backend], CompiledRun]
"""(context, recipe with a plan for devices, dataset, step, backend) -> compiled run."""
