"""Evaluate: metrics over every sample of the evaluation split, each counted once."""

from __future__ import annotations

import numpy as np

from pipeline.backends.base import Executable
from pipeline.errors import RunError
from pipeline.observe.monitors import Evaluation
from pipeline.stages.data import Dataset
from pipeline.training.metrics import summarize
from pipeline.training.state import TrainState


def evaluate(executable: Executable, state: TrainState, dataset: Dataset) -> Evaluation:
    """Metrics of a state; the last batch is padded and masked (D-17, E-01).

    Raises RunError should the number of samples not be that of the split, and where none of their
    labels counts.
    """
    sums = executable.evaluate(state, dataset.eval_order.steps_per_pass)
    if int(sums.samples) != len(dataset.eval):
        raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
    if int(sums.count) == 0:
        raise RunError(
            f"none of the labels of {sums.samples} evaluation samples counts: all are "
            "dataset.ignore_index; an evaluation needs one at least"
        )
    confusion = None if sums.confusion is None else np.asarray(sums.confusion)
    return Evaluation(summarize(sums, dataset.classes), confusion)
