"""Evaluate: metrics over every sample of the evaluation split, each counted once."""

from __future__ import annotations

import time
from collections.abc import Callable

import jax
import numpy as np

from pipeline.backends.base import Executable
from pipeline.data.dataset import Dataset
from pipeline.errors import RunError
from pipeline.observe.monitors import Evaluation
from pipeline.stages.train.dispatch_size import DispatchSize
from pipeline.training.metrics import EvalSums, summarize
from pipeline.training.state import TrainState


def evaluate(
    executable: Executable,
    state: TrainState,
    dataset: Dataset,
    dispatch_s: float,
    is_given_up: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Metrics of a state; the last batch is padded and masked (D-17, E-01).

    The batches are dispatched in pieces of about `dispatch_s` seconds, which changes no bit of
    the metrics. Before each it is asked whether the evaluation is given up: then it is None.
    Raises RunError should the number of samples not be that of the split, and where none of their
    labels counts.
    """
    batches = dataset.eval_order.steps_per_pass
    sums = _add_up(executable, state, batches, DispatchSize(dispatch_s), is_given_up)
    if sums is None:
        return None
    if int(sums.samples) != len(dataset.eval):
        raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
    if int(sums.count) == 0:
        raise RunError(
            f"none of the labels of {sums.samples} evaluation samples counts: all are "
            "dataset.ignore_index; an evaluation needs one at least"
        )
    confusion = None if sums.confusion is None else np.asarray(sums.confusion)
    return Evaluation(summarize(sums, dataset.classes), confusion)


def _add_up(
    executable: Executable,
    state: TrainState,
    batches: int,
    pace: DispatchSize,
    is_given_up: Callable[[], bool],
) -> EvalSums | None:
    """The sums over so many batches, on the host; None where that is given up."""
    sums, done = None, 0
    while done < batches:
        if is_given_up():
            return None
        stop = min(batches, done + pace.max_steps)
        begun = time.perf_counter()
        sums = executable.evaluate(state, done, stop, sums)
        pace.take_note(stop - done, time.perf_counter() - begun)
        done = stop
    return jax.tree.map(np.asarray, sums)
