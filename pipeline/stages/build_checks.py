"""Checks of a step before it is compiled: whether network, data, loss and metrics fit each other.

Each check raises RecipeError; `require_all` raises one for the problems of several checks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import linen as nn
from flax.errors import FlaxError

from pipeline.config.checks import wanted_metrics
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError, first_line
from pipeline.core.files.error_text import show
from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.dataset import Dataset
from pipeline.data.dataset_spec import BatchOp
from pipeline.data.transform import choices_among, select_ops
from pipeline.models.imported.imported_network import ImportedNetwork
from pipeline.models.layers.path_patterns import Path, require_covered
from pipeline.models.layers.precision import PathListing
from pipeline.models.layers.tokens import Lookup
from pipeline.models.modules.jit_layers import list_layers
from pipeline.models.modules.standard import Network
from pipeline.training.losses import label_mask, sample_losses
from pipeline.training.metrics import ALL_IN_TOP5, add_metric_sums, zero_sums
from pipeline.training.parallel.cuts import cuts_of, ranks_of_layers
from pipeline.training.parallel.microbatches import batch_multiple
from pipeline.training.part_specs import METRICS, MetricSpec, losses_for
from pipeline.training.state import StepConfig, TrainState, split
from pipeline.training.step import gradients_of, initial_variables, make_train_step
from pipeline.training.target_metrics import ClassCountMetric

UNTRACEABLE = (TypeError, ArithmeticError, LookupError, MemoryError, RecursionError, FlaxError)
"""Errors that jax and flax raise, besides ValueError, for sizes that no array can have."""


@contextmanager
def blaming_key(key: str, untraceable: str | None = None) -> Iterator[None]:
    """Report errors of the body as a problem of the recipe, under this key.

    Code that can't be traced is a problem of the key `untraceable`, if it is given.
    """
    try:
        yield
    except ValueError as error:
        raise RecipeError(f"{key}: {error}") from error
    except UNTRACEABLE as error:
        code = untraceable or key
        reason = first_line(error)
        if isinstance(error, LookupError | ZeroDivisionError):
            # Code of a custom part raises them, and jax doesn't: 'x' alone says little.
            reason = f"{type(error).__name__}: {reason}"
        raise RecipeError(f"{code}: can't be traced: {reason}") from error


MAX_PARAMETERS = 10**13
MAX_LABELS = 2**31 - 1
"""Evaluation counts in int32."""


@dataclass(frozen=True, eq=False)
class StepDraft:
    """A step in shapes, before all checks."""

    recipe: Recipe
    dataset: Dataset
    parts: StepConfig
    seed: np.ndarray
    outputs: tuple[int, ...]
    """Shape of a sample's logits."""
    variables: Any
    """Shapes and dtypes of the network's variables, as a tree."""
    state: TrainState | None = None
    """Shapes and dtypes; None before the last checks."""


Check = Callable[[StepDraft], None]


def require_all(checks: Sequence[Check], draft: StepDraft) -> None:
    """Raise RecipeError with the problems of all checks."""
    problems: list[str] = []
    for check in checks:
        try:
            check(draft)
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


def check_outputs(draft: StepDraft) -> None:
    """Require one logit for each class, once for each label of a sample."""
    outputs = draft.outputs
    dataset = draft.dataset
    count = len(dataset.targets)
    labels = len(dataset.eval) * math.prod(outputs[:-1])
    problem = None
    if outputs[-1] != count:
        purpose = f"{dataset.targets} are to be predicted"
        if dataset.targets.task == "classification":
            purpose = f"{count} classes are to be told apart"
        problem = f"the network ends in {outputs[-1]} outputs, and {purpose}"
    elif len(outputs) > 1 and not dataset.label_positions:
        problem = (
            f"the network ends in shape {('batch', *outputs)}, not (batch, classes), and a label "
            "is one class; end it in global_avg_pool or flatten, and dense"
        )
    elif labels > MAX_LABELS:
        problem = (
            f"the evaluation split has {labels:,} labels, and {MAX_LABELS:,} can be counted; "
            "set eval.samples to evaluate fewer samples"
        )
    if problem is not None:
        raise RecipeError(f"model {draft.recipe.model.name}: {problem}")


def check_labels(draft: StepDraft) -> None:
    """Require that the loss takes the labels of both splits, for its outputs per sample."""
    recipe = draft.recipe
    dataset = draft.dataset
    parts = draft.parts
    batch = recipe.train.batch_size
    ignore_index = parts.ignore_index
    logits = jax.ShapeDtypeStruct((batch, *draft.outputs), np.float32)
    for key, label in (("train", dataset.train_label), ("eval", dataset.eval_label)):
        with blaming_key(
            f"dataset.{key}.ops", untraceable=f"train.loss = {recipe.train.loss.name}"
        ):
            dtype = np.dtype(label.dtype)
            if ignore_index is not None and not (
                np.issubdtype(dtype, np.integer)
                and np.iinfo(dtype).min <= ignore_index <= min(np.iinfo(dtype).max, MAX_LABELS)
            ):
                raise ValueError(
                    f"leave labels of {dtype}, among which there is no dataset.ignore_index = "
                    f"{ignore_index}; leave them whole numbers that it is one of, or set it to null"
                )
            labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
            jax.eval_shape(partial(sample_losses, parts), logits, labels)


def check_vocabulary(draft: StepDraft) -> None:
    """Require a row for each token of the texts: numbers of others would give NaN."""
    text = draft.dataset.text
    network = draft.parts.network
    first = network.layers[0] if isinstance(network, Network) and network.layers else None
    if text is None or not isinstance(first, Lookup):
        return
    rows = first.vocabulary
    if isinstance(rows, int) and rows < text.vocabulary:
        problem = f"must be {text.vocabulary} at least, the tokens of the texts"
        raise RecipeError(f"model.vocabulary = {rows}: {problem}")


def check_to_float(draft: StepDraft) -> None:
    """Require that each pattern of `train.to_float` matches a layer."""
    rules = draft.recipe.train.to_float
    if not rules:
        return
    listing = PathListing()
    traced = replace(draft.parts, network=draft.parts.network.clone(rules=(listing,)))
    with blaming_key("train.to_float"):
        jax.eval_shape(lambda words: initial_variables(traced, words), draft.seed)
        require_covered([rule.pattern for rule in rules], list(listing.paths), "layers")


def check_jit_layers(draft: StepDraft) -> None:
    """Require that each pattern of `train.jit_layers` matches a layer with a module."""
    patterns = draft.recipe.train.jit_layers
    if not patterns:
        return
    paths: dict[Path, None] = {}
    with blaming_key("train.jit_layers"):
        with nn.intercept_methods(list_layers(paths)):
            jax.eval_shape(lambda words: initial_variables(draft.parts, words), draft.seed)
        require_covered(patterns, list(paths), "layers")


def check_curvature(draft: StepDraft) -> None:
    """Refuse an optimizer that reads the inputs of layers for a network that hides them."""
    recipe = draft.recipe
    if draft.parts.curvature is not None and isinstance(draft.parts.network, ImportedNetwork):
        optimizer = recipe.train.optimizer.name
        raise RecipeError(
            f"train.optimizer.name = {optimizer}: looks at what the layers of a list see, and "
            f"{recipe.model.name} is no list of layers; must be another one, such as momentum"
        )


def check_cuts(draft: StepDraft) -> None:
    """Require that the cuts of parameters fit the mesh."""
    parallel = draft.recipe.parallel
    cuts = cuts_of(parallel)
    if cuts is None or parallel.mode != "semi_auto":
        return
    with blaming_key("parallel.specs"):
        cuts.require_fit(draft.variables["params"], parallel.mesh_sizes, parallel.batch_axes)


def check_constraints(draft: StepDraft) -> None:
    """Require that each constraint matches a layer with the same number of axes."""
    parallel = draft.recipe.parallel
    cuts = cuts_of(parallel)
    if cuts is None or parallel.mode != "semi_auto" or not cuts.constraints:
        return
    trace = partial(jax.eval_shape, partial(initial_variables, draft.parts), draft.seed)
    with blaming_key("parallel.constraints"):
        cuts.require_layers(ranks_of_layers(trace))


def check_task(draft: StepDraft) -> None:
    """Require a loss for what is predicted, and metrics that evaluations of it have."""
    recipe = draft.recipe
    targets = draft.dataset.targets
    metrics = draft.parts.metrics
    task = targets.task
    loss = recipe.train.loss
    is_classification = task == "classification"
    if recipe.model.two_outputs_are_classes and not is_classification and len(targets) > 1:
        problem = f"predicts classes, or one number or label, and not {targets}"
        raise RecipeError(f"model {recipe.model.name}: {problem}")
    if task not in loss.tasks:
        fitting = ", ".join(losses_for(task))
        raise RecipeError(f"train.loss = {loss.name}: must be one for {task}: {fitting}")
    of_classes = [metric.name for metric in metrics if isinstance(metric, ClassCountMetric)]
    if of_classes and task in ("regression", "multi_label"):
        problem = f"{', '.join(of_classes)} is of classes, which {task} has not; leave it out"
        raise RecipeError(f"eval.metrics: {problem}")
    names = [metric.name for metric in metrics]
    standard = [*METRICS] if is_classification else ["loss"]
    if is_classification and len(targets) <= ALL_IN_TOP5:
        standard.remove("top5")
    all_names = [*standard, *names]
    doubled = sorted({name for name in all_names if all_names.count(name) > 1})
    if doubled:
        raise RecipeError(f"eval.metrics: {task} has {', '.join(doubled)} already; leave it out")
    for key, metric in wanted_metrics(recipe).items():
        if metric is not None and metric not in all_names:
            raise RecipeError(f"{key} = {metric}: {task} has {', '.join(all_names)}")


def check_metrics(draft: StepDraft) -> None:
    """Require that metrics take the network's outputs, and return sums like their zeros."""
    parts = draft.parts
    dataset = draft.dataset
    batch = dataset.eval_order.batch_size
    label = dataset.eval_label
    logits = jax.ShapeDtypeStruct((batch, *draft.outputs), np.float32)
    labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
    mask = jax.ShapeDtypeStruct((batch,), np.bool_)
    counted = jax.eval_shape(partial(label_mask, parts), labels)
    for position, metric in enumerate(parts.metrics):
        with blaming_key(f"eval.metrics.{position} ({metric.name})"):
            sums = jax.eval_shape(partial(zero_sums, parts.classes, (metric,)))
            jax.eval_shape(partial(_add_metric, metric), sums, logits, labels, mask, counted)


def _add_metric(metric: MetricSpec, sums: Any, *batch: Any) -> Any:
    return add_metric_sums(sums, (metric,), *batch)


def check_gradients(draft: StepDraft) -> None:
    """Require that custom gradients are like the parameters, beside the other results."""
    rule = draft.parts.gradients
    if rule is None:
        return
    state = _state_of(draft)
    trained, _ = split(state.params, draft.parts.frozen)
    result = state.loss_scale, state.batch_stats

    def apply_rule(trained: Any, result: Any, key: jax.Array) -> Any:
        return rule(lambda parameters: (parameters, result), trained, key)

    with blaming_key(f"train.gradients = {draft.recipe.train.gradients.name}"):
        gradients, passed = jax.eval_shape(apply_rule, trained, result, jax.random.key(0))
        if jax.tree.map(np.shape, gradients) != jax.tree.map(np.shape, trained):
            shapes = show(jax.tree.map(np.shape, gradients))
            raise ValueError(f"gives gradients of shapes {shapes}; must be like the parameters")
        if jax.tree.map(np.shape, passed) != jax.tree.map(np.shape, result):
            raise ValueError("must return what else the backward pass gave, beside the gradients")


def check_mixtures(draft: StepDraft) -> None:
    """Refuse a short batch before an op that would mix its padding with its samples."""
    short = draft.dataset.train_order.short_batch
    batch = draft.recipe.train.batch_size
    for position, op in enumerate(draft.dataset.train_ops):
        if short and isinstance(op, BatchOp):
            raise RecipeError(
                f"dataset.train.drop_remainder = false: a last batch would hold {short} of "
                f"{batch} samples, and dataset.train.ops.{position} "
                f"({op.name}) would mix its padding with them; must be true with this op"
            )


def check_statistics(draft: StepDraft) -> None:
    """Refuse a short batch with batch statistics: they would include its padding."""
    recipe = draft.recipe
    short = draft.dataset.train_order.short_batch
    if _state_of(draft).batch_stats and short:
        raise RecipeError(
            f"dataset.train.drop_remainder = false: the last batch would hold {short} of "
            f"{recipe.train.batch_size} samples and its padding would enter the batch "
            f"statistics of {recipe.model.name}; must be true for this network"
        )


def check_buckets(draft: StepDraft) -> None:
    """Refuse a network with weights that fit one bucket alone."""
    if not draft.parts.buckets:
        return
    step = make_train_step(draft.parts)
    batch = _batch_shapes(draft.dataset.eval, 1)
    try:
        jax.eval_shape(step.evaluate, _state_of(draft), batch, jax.eval_shape(step.zero_sums))
    except (ValueError, FlaxError) as error:
        raise RecipeError(
            f"dataset.buckets: the network can't take all of them: {_line_of(error)}; take one "
            "bucket, or a network that averages over positions before its dense layers"
        ) from error


def check_drawn_sizes(draft: StepDraft) -> None:
    """Refuse a network with weights that fit one size of images alone."""
    parts = draft.parts
    choices = choices_among(parts.train_ops)
    if choices == 1:
        return
    (position,) = (n for n, op in enumerate(parts.train_ops) if op.choices > 1)
    key = f"dataset.train.ops.{position} ({parts.train_ops[position].name})"
    if parts.curvature is not None:
        problem = "can't be had with an optimizer that looks at the inputs of layers; take another"
        raise RecipeError(f"{key}: {problem}")
    num_shards = 1 if parts.shards is None else parts.shards.count
    batch = _batch_shapes(draft.dataset.train, batch_multiple(parts.accumulate, num_shards))
    for number in range(choices):
        sized = replace(parts, train_ops=select_ops(parts.train_ops, number), shards=None)
        try:
            jax.eval_shape(partial(gradients_of, sized), _state_of(draft), batch)
        except (ValueError, TypeError, FlaxError) as error:
            raise RecipeError(
                f"{key}: the network can't take all sizes: {_line_of(error)}; take a network that "
                "averages over positions before its dense layers"
            ) from error


def _line_of(error: Exception) -> str:
    return str(error).splitlines()[0]


def _batch_shapes(split: Split, count: int) -> Any:
    """Return the shapes and dtypes of a batch of a split."""

    def shapes(*shape: int, dtype: object = np.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    columns = {
        name: shapes(count, *column.shape[1:], dtype=column.dtype)
        for name, column in split.columns.items()
    }
    return Batch(columns, shapes(2, dtype=np.uint32), shapes(), shapes(count), shapes())


def check_parameters(draft: StepDraft) -> None:
    """Refuse more parameters than anything holds."""
    if sum(leaf.size for leaf in jax.tree.leaves(_state_of(draft).params)) > MAX_PARAMETERS:
        problem = f"has more than {MAX_PARAMETERS:,} parameters, which nothing holds"
        raise RecipeError(f"model {draft.recipe.model.name}: {problem}")


def _state_of(draft: StepDraft) -> TrainState:
    assert draft.state is not None, "these checks come last"
    return draft.state


LAYER_CHECKS = (check_labels, check_vocabulary, check_to_float, check_jit_layers)
TASK_CHECKS = (check_curvature, check_cuts, check_constraints, check_task)
STATE_CHECKS = (
    check_gradients,
    check_statistics,
    check_mixtures,
    check_buckets,
    check_drawn_sizes,
    check_parameters,
)
"""Groups in their order: a problem of one group would show again as others in later ones."""
