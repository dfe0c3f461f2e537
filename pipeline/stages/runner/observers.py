"""Observers: the monitors of one run, as its recipe configures them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.backends.base import Estimate
from pipeline.config.precision import loss_scale_of
from pipeline.config.recipe import Recipe
from pipeline.core.files.folder_lock import Lock
from pipeline.core.reporter import Reporter
from pipeline.data.columns import IMAGES, SampleUnit
from pipeline.engine.monitors.background import BackgroundMonitor
from pipeline.engine.monitors.bad_steps import BadStepMonitor
from pipeline.engine.monitors.best_effort import BestEffortMonitor
from pipeline.engine.monitors.board_graph import BoardNode
from pipeline.engine.monitors.functional_lines import EVERY, FunctionalMonitor
from pipeline.engine.monitors.histograms import Histogram
from pipeline.engine.monitors.lock_monitor import LockMonitor
from pipeline.engine.monitors.metrics_log import KEPT, MetricsLog
from pipeline.engine.monitors.monitors import (
    EvalMonitor,
    Evaluation,
    LossMonitor,
    Monitor,
    ProgressMonitor,
    TimeMonitor,
)
from pipeline.engine.monitors.tensorboard import TensorBoard, board_folder
from pipeline.engine.schedule import RunSchedule


class Observers:
    """The monitors of a run, on a thread of their own, and TensorBoard where it is on."""

    def __init__(
        self,
        monitors: Sequence[Monitor],
        tensorboard: BestEffortMonitor[TensorBoard] | None,
        log: MetricsLog | None = None,
    ) -> None:
        self.monitor = BackgroundMonitor(monitors)
        self._log, self._tensorboard = log, tensorboard

    def log_flaws(self) -> dict[str, Any]:
        """Return the flaws that the logs had when they were opened, by file, as JSON."""
        findings = self._log.found if self._log is not None else []
        return {log.path.name: log.to_dict() for log in findings}

    def log_marks(self, step: int) -> dict[str, Any]:
        """Return the marks of the logs for the checkpoint of `step`, as JSON."""
        if self._log is None:
            return {}
        return {KEPT: self.monitor.submit_and_wait(self._log.marks, step)}

    def show_samples(self, images: np.ndarray, labels: Sequence[str] = ()) -> None:
        """Show training images (n, H, W, C), as the network sees them, in TensorBoard."""
        if len(images):
            self._on_tensorboard(lambda board: board.add_images(images, labels))

    def show_predictions(
        self, step: int, images: np.ndarray, captions: Sequence[str], wrong: Sequence[bool]
    ) -> None:
        """Show evaluation images with what is predicted of each, in TensorBoard."""
        self._on_tensorboard(lambda board: board.add_predictions(step, images, captions, wrong))

    def show_classes(self, names: Sequence[str]) -> None:
        """Write the names of the classes into TensorBoard as text."""
        self._on_tensorboard(lambda board: board.add_classes(names))

    def show_masks(self, step: int, pictures: np.ndarray) -> None:
        """Show pictures of predictions, uint8 (n, H, W, 3), in TensorBoard."""
        self._on_tensorboard(lambda board: board.add_masks(step, pictures))

    def show_histograms(self, step: int, histograms: Mapping[str, Histogram]) -> None:
        """Show histograms after a step, by name, in TensorBoard."""
        self._on_tensorboard(lambda board: board.add_histograms(step, histograms))

    def show_graph(self, nodes: Sequence[BoardNode]) -> None:
        """Show the graph of the network in TensorBoard."""
        self._on_tensorboard(lambda board: board.add_graph(nodes))

    def show_embeddings(
        self, vectors: np.ndarray, labels: Sequence[str], images: np.ndarray | None
    ) -> None:
        """Show embeddings, float32 (n, features), in TensorBoard's projector."""
        self._on_tensorboard(lambda board: board.add_embeddings(vectors, labels, images))

    def add_hparams(self, changed: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Add a run to the hparams table of TensorBoard."""
        if changed:
            self._on_tensorboard(lambda board: board.add_hparams(changed, evaluation.scalars()))

    def add_recipe(self, recipe: Recipe) -> None:
        """Write the recipe into TensorBoard as text."""
        self._on_tensorboard(lambda board: board.add_recipe(recipe.model_dump(mode="json")))

    def _on_tensorboard(self, call: Callable[[TensorBoard], None]) -> None:
        if self._tensorboard is not None:
            self.monitor.submit(self._tensorboard.attempt, call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.close()


@dataclass(frozen=True)
class ObserverOptions:
    """What the observers of a run depend on beside its recipe and schedule."""

    estimate: Estimate | None = None
    """Shown beside the measured times, under names of its own."""
    kept_logs: Mapping[str, Any] | None = None
    """The marks of the logs in the checkpoint that the run goes on from; None if it begins."""
    lock: Lock | None = None
    """Keeps other processes out of the directory."""
    scalars: bool = False
    """Whether callbacks may log any."""
    unit: SampleUnit = IMAGES
    """What speed is counted in."""


def open_observers(
    recipe: Recipe,
    run_dir: Path,
    run_schedule: RunSchedule,
    first: int,
    reporter: Reporter,
    options: ObserverOptions = ObserverOptions(),
) -> Observers:
    """Open the observers of a run that goes on from boundary `first`.

    A log of steps that can't be written ends the run; TensorBoard and the progress bar are best
    effort.
    """
    batch_size, estimate, unit = recipe.train.batch_size, options.estimate, options.unit
    kept_logs, scalars = options.kept_logs, options.scalars
    log = MetricsLog(run_dir, run_schedule, first, kept_logs, scalars=scalars)
    for findings in log.found:
        reporter.warn(str(findings))
    monitors: list[Monitor] = [
        *([LockMonitor(run_dir, options.lock)] if options.lock is not None else []),
        log,
        *_lines(recipe, run_schedule, reporter, estimate, unit),
        BadStepMonitor(reporter, skips_overflow=loss_scale_of(recipe).skips_overflow),
    ]
    bar = reporter.bar(run_schedule.total, first) if "train" in recipe.stages else None
    if bar is not None:
        monitors.append(BestEffortMonitor(ProgressMonitor(bar), "the progress bar", reporter.warn))
    tensorboard = None
    if recipe.monitor.tensorboard:
        board = TensorBoard(board_folder(run_dir), first, batch_size, estimate, unit)
        tensorboard = BestEffortMonitor(board, "TensorBoard", reporter.warn)
        monitors.append(tensorboard)
    observers = Observers(monitors, tensorboard, log)
    observers.add_recipe(recipe)
    return observers


def _lines(
    recipe: Recipe,
    run_schedule: RunSchedule,
    reporter: Reporter,
    estimate: Estimate | None,
    unit: SampleUnit,
) -> list[Monitor]:
    """The monitors that print the lines of training."""
    every = recipe.monitor.loss_every
    if recipe.monitor.lines == "functional":
        return [FunctionalMonitor(reporter.say, run_schedule, EVERY if every else 0)]
    return [
        LossMonitor(reporter, run_schedule, every),
        TimeMonitor(reporter, run_schedule, recipe.train.batch_size, estimate, unit),
        EvalMonitor(reporter),
    ]
