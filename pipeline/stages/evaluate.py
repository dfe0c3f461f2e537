"""Evaluate: metrics over every sample of the evaluation split, each counted once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pipeline.backends.base import Executable
from pipeline.core.errors import RunError
from pipeline.data.dataset import Dataset
from pipeline.engine.callbacks.events import TRAINED, Evaluation
from pipeline.engine.schedule import DispatchSize
from pipeline.training.metrics import EvalSums, summarize
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.part_specs import MetricSpec
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation: its metrics, and the length of its chunks."""

    dispatch_s: float
    """Seconds of a chunk of batches, about; changes no bit of the metrics."""
    metrics: Sequence[MetricSpec] = ()
    """The metrics that have sums of their own."""
    on_train: bool = False
    """Whether there are also the metrics of training samples, as `train_accuracy`."""


def evaluate(
    executable: Executable,
    state: TrainState,
    dataset: Dataset,
    options: EvalOptions,
    is_given_up: Callable[[], bool] = lambda: False,
    agree: Agree = decide_alone,
) -> Evaluation | None:
    """Compute the metrics of a state; the last batch is padded and masked.

    `is_given_up` is called before each chunk; where it is true, None is returned. `agree` returns
    what all processes of the run do. Raises RunError where the number of samples is not that of the
    split, and where all labels are masked.
    """
    batches, metrics = dataset.eval_order.steps_per_pass, options.metrics
    size = DispatchSize(options.dispatch_s)
    sums = _add_up(executable.evaluate, state, batches, size, is_given_up, agree)
    if sums is None:
        return None
    if int(sums.samples) != len(dataset.eval):
        raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
    if int(sums.count) == 0:
        raise RunError(
            f"none of the labels of {sums.samples} evaluation samples counts: all are "
            "dataset.ignore_index; an evaluation needs one at least"
        )
    counted = None if sums.classes is None else sums.classes.confusion
    confusion = None if counted is None else np.asarray(counted)
    unit = dataset.unit.counted if dataset.unit.each > 1 else "samples"
    evaluation = Evaluation(summarize(sums, dataset.classes, metrics), confusion, unit)
    if not options.on_train:
        return evaluation
    size = DispatchSize(options.dispatch_s)
    add = partial(executable.evaluate, on_train=True)
    sums = _add_up(add, state, batches, size, is_given_up, agree)
    if sums is None:
        return None
    trained = Evaluation(summarize(sums, dataset.classes, metrics), None).scalars()
    more = {f"{TRAINED}{name}": value for name, value in trained.items()}
    return Evaluation({**evaluation.metrics, **more}, confusion, unit)


def _add_up(
    add: Callable[..., EvalSums],
    state: TrainState,
    batches: int,
    size: DispatchSize,
    is_given_up: Callable[[], bool],
    agree: Agree,
) -> EvalSums | None:
    """Return the sums over `batches` batches by `add`, on the host; None where it is given up."""
    sums, done = None, 0
    while done < batches:
        if is_given_up():
            return None
        stop = min(batches, done + agree(lambda: size.max_steps))
        started_at = time.perf_counter()
        sums = add(state, done, stop, sums)
        size.take_note(stop - done, time.perf_counter() - started_at)
        done = stop
    return jax.tree.map(np.asarray, sums)
