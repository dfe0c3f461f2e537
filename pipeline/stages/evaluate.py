"""Evaluate: compute metrics over the evaluation split, with each sample once.

Losses of classes read networks that end in probabilities as logits.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Var

from pipeline.backends.base import Executable
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.jaxpr import find_called_jaxpr
from pipeline.core.reporter import Reporter
from pipeline.data.inputs import Dataset
from pipeline.engine.callbacks.callback import TRAINED, Evaluation
from pipeline.engine.schedule import DispatchSize
from pipeline.training.component_specs import MetricSpec
from pipeline.training.metrics import EvalSums, summarize
from pipeline.training.parallel.ranks import Agree, decide_alone
from pipeline.training.state import TrainState

PASSED_ON = frozenset(
    ("convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "copy")
)
"""Primitives that change no value, except by rounding."""


def warn_of_probabilities(recipe: Recipe, jaxpr: Jaxpr, reporter: Reporter) -> None:
    """Warn if a jaxpr's first result is probabilities and the recipe's loss reads it as logits."""
    loss = recipe.train.loss
    ending = find_probabilities(jaxpr)
    if ending is not None and loss.reads_logits:
        reporter.warn(
            f"model {recipe.model.name}: ends in {ending}, and train.loss = {loss.name} reads "
            "outputs as logits; end in the values before it"
        )


def find_probabilities(jaxpr: Jaxpr) -> str | None:
    """Return "softmax" or "sigmoid" if a jaxpr's first result is computed by it, else None."""
    source = _Sources(jaxpr).find(jaxpr.outvars[0])
    if source is None:
        return None
    sources, equation = source
    name = equation.primitive.name
    if name == "logistic":
        return "sigmoid"
    operands = [sources.find(operand) for operand in equation.invars]
    names = [None if found is None else found[1].primitive.name for found in operands]
    if name == "div" and names == ["exp", "reduce_sum"]:
        return "softmax"
    if name == "concatenate" and "logistic" in names and "sub" in names:
        return "sigmoid"
    return None


class _Sources:
    """The equations that compute the variables of a jaxpr, inside of calls too."""

    def __init__(self, jaxpr: Jaxpr, outer: Mapping[Var, tuple[_Sources, object]] | None = None):
        self._equations = {
            variable: equation for equation in jaxpr.eqns for variable in equation.outvars
        }
        self._outer = outer or {}

    def find(self, variable: object) -> tuple[_Sources, JaxprEqn] | None:
        """Return the equation that computes a variable, before those that pass values on."""
        if not isinstance(variable, Var):
            return None
        if variable in self._outer:
            sources, operand = self._outer[variable]
            return sources.find(operand)
        equation = self._equations.get(variable)
        if equation is None:
            return None
        if equation.primitive.name in PASSED_ON:
            return self.find(equation.invars[0])
        called = find_called_jaxpr(equation)
        if called is None:
            return self, equation
        inner = called.jaxpr
        operands = equation.invars[len(equation.invars) - len(inner.invars) :]
        outer = {
            name: (self, operand) for name, operand in zip(inner.invars, operands, strict=True)
        }
        return _Sources(inner, outer).find(inner.outvars[equation.outvars.index(variable)])


@dataclass(frozen=True)
class EvalOptions:
    """Metrics of an evaluation, and the length of its chunks."""

    dispatch_s: float
    """Approximate seconds of a chunk of batches. Metrics don't depend on it."""
    metrics: Sequence[MetricSpec] = ()
    """The metrics of the compiled evaluation besides the standard metrics, in its order."""
    on_train: bool = False
    """Whether to compute the metrics of training samples too, such as `train_accuracy`."""


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
    not every sample was evaluated once, or if all labels are masked.
    """
    metrics = options.metrics

    def add_up(add: Callable[..., EvalSums]) -> EvalSums | None:
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
        return jax.tree.map(np.asarray, sums)

    sums = add_up(executable.evaluate)
    if sums is None:
        return None
    if int(sums.samples) != len(dataset.eval):
        raise RunError(f"evaluated {sums.samples} samples of {len(dataset.eval)}")
    if int(sums.count) == 0:
        raise RunError(
            f"all labels of the {sums.samples} evaluation samples are dataset.ignore_index; at "
            "least one must be another number"
        )
    counts = None if sums.classes is None else sums.classes.confusion
    confusion = None if counts is None else np.asarray(counts)
    values = summarize(sums, dataset.classes, metrics)
    if options.on_train:
        train_sums = add_up(partial(executable.evaluate, on_train=True))
        if train_sums is None:
            return None
        train_values = Evaluation(summarize(train_sums, dataset.classes, metrics), None).scalars()
        values |= {f"{TRAINED}{name}": value for name, value in train_values.items()}
    return Evaluation(values, confusion, dataset.label_unit)
