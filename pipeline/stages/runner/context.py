"""Inputs of a run: its options, services, features, built step and compiled programs."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.backends.base import Backend, Executable
from pipeline.config.recipe import Recipe
from pipeline.core.files.atomic_write import Lock
from pipeline.core.host.signals import Signals
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.callbacks.callback import Callback, Pruner
from pipeline.engine.hooks import Deadline, MovableEnd
from pipeline.stages.build import Built
from pipeline.stages.record.provenance import Provenance
from pipeline.stages.record.run_directory import RunFolder
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.resume_command import HowToResume, make_resume_overrides
from pipeline.stages.runner.run_features import RunFeatures
from pipeline.training.parallel.ranks import Ranks


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
    features: RunFeatures = field(default_factory=RunFeatures)
    """Things that the run does besides its stages."""

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
class BuiltRun:
    """A run with its data and its step, before its programs."""

    context: RunContext
    recipe: Recipe
    """The context's recipe, with a plan for devices."""
    dataset: Dataset
    built: Built
    backend: Backend


@dataclass(frozen=True)
class CompiledRun:
    """A run with its data, its step lowered for a device, and the compiled programs."""

    context: RunContext
    dataset: Dataset
    built: Built
    backend: Backend
    executable: Executable


OpenPrograms = Callable[[BuiltRun], CompiledRun]
"""Lowers the step of a run, and compiles its programs."""
