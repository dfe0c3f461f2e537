"""Evaluate: compute metrics over the evaluation split, with each sample once."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np

from pipeline.backends.base import Executable
from pipeline.core.errors import RunError
from pipeline.data.inputs import Dataset
from pipeline.engine.callbacks.callback import TRAINED, Evaluation
from pipeline.engine.schedule import DispatchSize
from pipeline.training.component_specs import MetricSpec
from pipeline.training.metrics import EvalSums, summarize
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState


@dataclass(frozen=True)
class EvalOptions:
    """Metrics of an evaluation, and the length of its chunks."""

    dispatch_s: float
    """Approximate seconds of a chunk of batches. Metrics don't depend on it."""
    metrics: Sequence[MetricSpec] = ()
    """The metrics of the compiled evaluation besides the standard metrics, in its order."""
    on_train: bool = False
    """Whether to compute the metrics of as many training samples too, such as `train_accuracy`."""


def evaluate(
    executable: Executable,
    state: TrainState,
    dataset: Dataset,
    options: EvalOptions,
    is_stopped: Callable[[], bool] = lambda: False,
    agree: Agree = decide_alone,
) -> Evaluation | None:
    """Return the metrics of a state, or None if stopped.

    `is_stopped` is called before each chunk of batches, and stops the evaluation if it is true.
    `agree` calls a function in the first process and returns its result in all. Raises RunError if
    not every sample was evaluated once, or if all labels of a split are masked.
    """

    def add_up(split: str, add: Callable[..., EvalSums]) -> EvalSums | None:
        """Return the sums of `add` over all batches, on the host; None if stopped."""
        size = DispatchSize(options.dispatch_s)
        sums = None
        start = 0
        while start < dataset.eval_order.steps_per_epoch:
            if is_stopped():
                return None
            end = min(dataset.eval_order.steps_per_epoch, start + agree(lambda: size.max_steps))
            started_at = time.perf_counter()
            sums = add(state, start, end, sums)
            size.record(end - start, time.perf_counter() - started_at)
            start = end
        sums = jax.tree.map(np.asarray, sums)
        if int(sums.samples) != len(dataset.eval):
            raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
        if int(sums.count) == 0:
            raise RunError(
                f"all labels of the {sums.samples} {split} samples are dataset.ignore_index; at "
                "least one must be another number"
            )
        return sums

    sums = add_up("evaluation", executable.evaluate)
    if sums is None:
        return None
    values = summarize(sums, dataset.classes, options.metrics)
    if options.on_train:
        train_sums = add_up("training", partial(executable.evaluate, on_train=True))
        if train_sums is None:
            return None
        train_values = summarize(train_sums, dataset.classes, options.metrics)
        scalars = Evaluation(train_values, None).scalars()
        values |= {f"{TRAINED}{name}": value for name, value in scalars.items()}
    counts = None if sums.classes is None else sums.classes.confusion
    confusion = None if counts is None else np.asarray(counts)
    return Evaluation(values, confusion, dataset.label_unit)
