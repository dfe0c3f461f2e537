"""All that watches one run, put together as its recipe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.backends.base import Estimate
from pipeline.config.precision import loss_scale_of
from pipeline.config.recipe import Recipe
from pipeline.observe.bad_steps import BadStepMonitor
from pipeline.observe.expendable import Expendable
from pipeline.observe.metrics_log import MetricsLog
from pipeline.observe.monitors import (
    EvalMonitor,
    Evaluation,
    LossMonitor,
    Monitor,
    ProgressMonitor,
    TimeMonitor,
)
from pipeline.observe.off_thread import OffThread
from pipeline.observe.reporter import Reporter
from pipeline.observe.tensorboard import TensorBoard
from pipeline.sink.schedule import Course


class Observers:
    """The monitors of a run, on a thread of their own, and TensorBoard where it is wanted."""

    def __init__(self, monitors: Sequence[Monitor], tensorboard: Expendable | None) -> None:
        self.monitor = OffThread(monitors)
        self._tensorboard = tensorboard

    def show_samples(self, images: np.ndarray) -> None:
        """Put training images (n, H, W, C) as the network sees them into TensorBoard."""
        if self._tensorboard is not None and len(images):
            self.monitor.tell(self._tensorboard.tell, "add_images", images)

    def add_hparams(self, changed: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Enter a run of a sweep into TensorBoard's table."""
        if self._tensorboard is not None and changed:
            hparams = changed, evaluation.scalars()
            self.monitor.tell(self._tensorboard.tell, "add_hparams", *hparams)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.monitor.close()


def open_observers(
    recipe: Recipe,
    run_dir: Path,
    course: Course,
    first: int,
    reporter: Reporter,
    estimate: Estimate | None = None,
) -> Observers:
    """Open what watches a run that goes on from boundary `first`.

    An `estimate` is shown beside what is measured, under names of its own. A log of steps that
    can't be written ends the run; TensorBoard and the progress bar it can do without.
    """
    batch_size = recipe.train.batch_size
    monitors: list[Monitor] = [
        MetricsLog(run_dir, course, first),
        LossMonitor(reporter, course, recipe.monitor.loss_every),
        TimeMonitor(reporter, course, batch_size, estimate),
        EvalMonitor(reporter),
        BadStepMonitor(reporter, skips_overflow=loss_scale_of(recipe).skips_overflow),
    ]
    bar = reporter.bar(course.total, first) if "train" in recipe.stages else None
    if bar is not None:
        monitors.append(Expendable(ProgressMonitor(bar), "the progress bar", reporter.warn))
    tensorboard = None
    if recipe.monitor.tensorboard:
        board = TensorBoard(run_dir / "tensorboard", first, batch_size, estimate)
        tensorboard = Expendable(board, "TensorBoard", reporter.warn)
        monitors.append(tensorboard)
    observers = Observers(monitors, tensorboard)
    if tensorboard is not None:
        observers.monitor.tell(tensorboard.tell, "add_recipe", recipe.model_dump(mode="json"))
    return observers
