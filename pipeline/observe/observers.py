"""All that watches one run, put together as its recipe says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np

from pipeline.backends.base import Estimate
from pipeline.config.recipe import Recipe
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

    def __init__(self, monitors: Sequence[Monitor], tensorboard: TensorBoard | None) -> None:
        self.monitor = OffThread(monitors)
        self._tensorboard = tensorboard

    def show_samples(self, images: np.ndarray) -> None:
        """Put training images (n, H, W, C) as the network sees them into TensorBoard."""
        if self._tensorboard is not None and len(images):
            self.monitor.tell(self._tensorboard.add_images, images)

    def add_hparams(self, changed: Mapping[str, Any], evaluation: Evaluation) -> None:
        """Enter a run of a sweep into TensorBoard's table."""
        if self._tensorboard is not None and changed:
            self.monitor.tell(self._tensorboard.add_hparams, changed, evaluation.scalars())

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

    An `estimate` is shown beside what is measured, under names of its own.
    """
    batch_size = recipe.train.batch_size
    monitors: list[Monitor] = [
        MetricsLog(run_dir, course, first),
        LossMonitor(reporter, course, recipe.monitor.loss_every),
        TimeMonitor(reporter, course, batch_size, estimate),
        EvalMonitor(reporter),
    ]
    bar = reporter.bar(course.total, first) if "train" in recipe.stages else None
    if bar is not None:
        monitors.append(ProgressMonitor(bar))
    tensorboard = None
    if recipe.monitor.tensorboard:
        tensorboard = TensorBoard(run_dir / "tensorboard", first, batch_size, estimate)
        monitors.append(tensorboard)
    observers = Observers(monitors, tensorboard)
    if tensorboard is not None:
        observers.monitor.tell(tensorboard.add_recipe, recipe.model_dump(mode="json"))
    return observers
