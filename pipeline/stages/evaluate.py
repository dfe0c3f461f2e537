"""Evaluate: metrics over every sample of the evaluation split, each counted once."""

from __future__ import annotations

from math import prod

import numpy as np

from pipeline.backends.base import Executable
from pipeline.errors import RunError
from pipeline.observe.monitors import Evaluation
from pipeline.stages.data import Dataset
from pipeline.training.metrics import summarize
from pipeline.training.state import TrainState


def evaluate(executable: Executable, state: TrainState, dataset: Dataset) -> Evaluation:
    """Metrics of a state; the last batch is padded and masked (D-17, E-01).

    Raises RunError should the number of labels counted not be that of the split.
    """
    sums = executable.evaluate(state, dataset.eval_order.steps_per_pass)
    metrics = summarize(sums, dataset.classes)
    labels = len(dataset.eval) * prod(dataset.label_positions)
    if metrics["count"] != labels:
        raise RunError(f"evaluated {metrics['count']} labels of {labels}")
    return Evaluation(metrics, np.asarray(sums.confusion))
