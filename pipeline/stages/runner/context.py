"""The services and settings of one run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.config.recipe import Recipe
from pipeline.core.files.folder_lock import Lock
from pipeline.core.host.signals import Signals
from pipeline.core.reporter import Reporter
from pipeline.engine.callbacks.callback import Callback
from pipeline.engine.callbacks.events import Pruner
from pipeline.stages.record.provenance import Provenance
from pipeline.stages.record.run_folder import RunFolder
from pipeline.stages.record.summary import Summary
from pipeline.training.parallel.ranks import Ranks


@dataclass(frozen=True)
class RunContext:
    """Recipe, directory and services of one run; what stages compute is passed apart from it."""

    recipe: Recipe
    folder: RunFolder
    resuming: bool
    reporter: Reporter
    summary: Summary
    changed: Mapping[str, Any]
    started_at: float
    """When the command started, by `time.perf_counter`."""
    signals: Signals
    pruner: Pruner | None = None
    lock: Lock | None = None
    """Lock on the directory against other processes."""
    ranks: Ranks = field(default_factory=Ranks)
    """The processes of the run; only the first one writes."""
    callbacks: tuple[Callback, ...] = ()
    """Callbacks that were given in Python, called after those of the recipe."""
    process: Provenance | None = None
    """The origin of what this process does, once its data are read; only the first one has it."""

    @property
    def run_dir(self) -> Path:
        """The directory of the run."""
        return self.folder.path

    @property
    def shows_pictures(self) -> bool:
        """Whether this process has a TensorBoard to show pictures of predictions in."""
        return self.recipe.monitor.tensorboard and self.ranks.is_first
