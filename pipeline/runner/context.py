"""What a run is about, and what its first three stages make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.autosink.choose_sink import SinkPlan
from pipeline.backends.base import Backend, Estimate, Executable
from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.files.folder_lock import Lock
from pipeline.host.signals import Signals
from pipeline.observe.monitors import Pruner
from pipeline.observe.reporter import Reporter
from pipeline.runner.record.summary import Summary
from pipeline.stages.build import Built


@dataclass(frozen=True)
class RunContext:
    """What one run is about, beside what its stages make."""

    recipe: Recipe
    run_dir: Path
    resuming: bool
    reporter: Reporter
    summary: Summary
    changed: Mapping[str, Any]
    begun: float
    """When the command began, by `time.perf_counter`."""
    signals: Signals
    pruner: Pruner | None = None
    lock: Lock | None = None
    """What keeps other processes out of the directory."""


@dataclass(frozen=True)
class CompiledRun:
    """What the first three stages made; `estimate` on emulated devices, `sink` for training."""

    backend: Backend
    dataset: Dataset
    built: Built
    executable: Executable
    estimate: Estimate | None
    sink: SinkPlan | None = None
