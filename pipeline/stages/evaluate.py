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
from pipeline.training.component_specs import MetricSpec
from pipeline.training.metrics import EvalSums, summarize
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class EvalOptions:
    """Options of an evaluation: its metrics, and the length of its chunks."""

    dispatch_s: float
    """Seconds of a chunk of batches, about; changes no bit of the metrics."""
    metrics: Sequence[MetricSpec] = ()
    """The metrics that have separate sums."""
    on_train: bool = False
    """Whether there are also the metrics of training samples, as `train_accuracy`."""


def evaluate(
    executable: Executable,
    state: TrainState,
    dataset: Dataset,
    options: EvalOptions,
    is_stopped: Callable[[], bool] = lambda: False,
    agree: Agree = decide_alone,
) -> Evaluation | None:
    """Compute the metrics of a state; the last batch is padded and masked.

    `is_stopped` is called before each chunk; if it is true, None is returned. `agree` returns what
    all processes of the run do. Raises RunError if the number of samples differs from the split's,
    or all labels are masked.
    """
    metrics = options.metrics

    def add_up(add: Callable[..., EvalSums]) -> EvalSums | None:
        """Return the sums over all batches by `add`, on the host; None if `is_stopped`."""
        size = DispatchSize(options.dispatch_s)
        sums = None
        done = 0
        while done < dataset.eval_order.steps_per_epoch:
            if is_stopped():
                return None
            stop = min(dataset.eval_order.steps_per_epoch, done + agree(lambda: size.max_steps))
            started_at = time.perf_counter()
            sums = add(state, done, stop, sums)
            size.take_note(stop - done, time.perf_counter() - started_at)
            done = stop
        return jax.tree.map(np.asarray, sums)

    sums = add_up(executable.evaluate)
    if sums is None:
        return None
    if int(sums.samples) != len(dataset.eval):
        raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
    if int(sums.count) == 0:
        raise RunError(
            f"none of the labels of {sums.samples} evaluation samples counts: all are "
            "dataset.ignore_index; an evaluation needs one at least"
        )
    counts = None if sums.classes is None else sums.classes.confusion
    confusion = None if counts is None else np.asarray(counts)
    unit = dataset.unit.counted if dataset.unit.each > 1 else "samples"
    values = summarize(sums, dataset.classes, metrics)
    if options.on_train:
        train_sums = add_up(partial(executable.evaluate, on_train=True))
        if train_sums is None:
            return None
        train_values = Evaluation(summarize(train_sums, dataset.classes, metrics), None).scalars()
        values = {**values, **{f"{TRAINED}{name}": v for name, v in train_values.items()}}
    return Evaluation(values, confusion, unit)
