"""Checks of a step before it is compiled: whether network, data, loss and metrics fit together.

Each check raises RecipeError.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_deciding_metrics
from pipeline.core.errors import RecipeError, first_line
from pipeline.core.host.array_values import find_shapes
from pipeline.data.batch import shape_batch
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.inputs import Dataset
from pipeline.data.transform import count_choices, select_variants
from pipeline.models.layers.model_spec import walk_layers
from pipeline.models.layers.path_patterns import LayerPath, require_covered
from pipeline.models.layers.precision import PathListing
from pipeline.models.modules.network import Network, RowLookupNetwork
from pipeline.stages.key_errors import UNTRACEABLE, blaming_key
from pipeline.stages.step_features import require_same_form, require_same_shapes
from pipeline.training.component_specs import METRICS, list_losses
from pipeline.training.features.accumulation import count_microbatches
from pipeline.training.features.gradient_rules import GradientRule
from pipeline.training.losses import USUAL_LOSSES, compute_losses, make_label_mask
from pipeline.training.metrics import ALL_IN_TOP5, add_metric_sums, zero_sums
from pipeline.training.parallel.microbatches import compute_batch_multiple
from pipeline.training.state import split_params
from pipeline.training.step import compute_step_gradients, make_train_step
from pipeline.training.step_config import StepConfig
from pipeline.training.target_metrics import ClassCountMetric
from pipeline.training.update import init_with_output

MAX_PARAMETERS = 10**13
"""Most parameters of a network, 40 TB in float32: a larger size is mistyped."""
MAX_LABELS = 2**31 - 1
"""Most labels of an evaluation, which sums their number in int32."""


@dataclass(frozen=True, eq=False)
class StepDraft:
    """A step to check. Its arrays are shapes and dtypes."""

    recipe: Recipe
    dataset: Dataset
    step_config: StepConfig
    seed: np.ndarray
    """uint32 (2,)."""
    outputs: tuple[int, ...]
    """Shape of a sample's logits."""
    variables: Any
    """Shapes and dtypes of the network's variables, as a tree."""
    state: Any = None
    """Shapes and dtypes of a `TrainState`; None before `STATE_CHECKS`."""


def require_pair_inputs(recipe: Recipe, dataset: Dataset) -> None:
    """Raise RecipeError for pairs to match and a network that reads one array."""
    if dataset.targets.task == "matching" and not recipe.model.list_inputs():
        raise RecipeError(
            f"model = {recipe.model.name}: reads one input; to match pairs a network must name two "
            "inputs, as branches with inputs do, and end in an embedding of each"
        )


def check_outputs(draft: StepDraft) -> None:
    """Require the shape (classes,) of a sample's logits, (..., classes) for several labels, or
    (2 * features,) for a pair to match."""
    outputs = draft.outputs
    if not outputs:
        raise RecipeError(
            f"model {draft.recipe.model.name}: the network ends in one number for each sample, or "
            "in one for all; must end in (batch, classes)"
        )
    dataset = draft.dataset
    num_targets = len(dataset.targets)
    num_labels = len(dataset.eval) * math.prod(outputs[:-1])
    problem = None
    if dataset.targets.task == "matching":
        if len(outputs) > 1 or outputs[-1] % 2:
            problem = (
                f"the network ends in shape {('batch', *outputs)}; to match pairs it must end in "
                "(batch, 2 * features), an embedding of each text, as branches with inputs return"
            )
    elif outputs[-1] != num_targets:
        is_classification = dataset.targets.task == "classification"
        targets = f"{num_targets} classes" if is_classification else str(dataset.targets)
        problem = f"the network ends in {outputs[-1]} outputs, and the dataset has {targets}"
    elif len(outputs) > 1 and not dataset.label_positions:
        problem = (
            f"the network ends in shape {('batch', *outputs)}, not (batch, classes), and a label "
            "is one class; end it in global_avg_pool or flatten, and dense"
        )
    elif num_labels > MAX_LABELS:
        problem = (
            f"the evaluation split has {num_labels:,} labels, and {MAX_LABELS:,} can be counted; "
            "set eval.samples to evaluate fewer samples"
        )
    if problem is not None:
        raise RecipeError(f"model {draft.recipe.model.name}: {problem}")


def check_labels(draft: StepDraft) -> None:
    """Require that the loss accepts the outputs, and the labels of both splits."""
    recipe = draft.recipe
    dataset = draft.dataset
    step_config = draft.step_config
    batch = recipe.train.batch_size
    ignore_index = step_config.objective.ignore_index
    logits = jax.ShapeDtypeStruct((batch, *draft.outputs), np.float32)
    loss_key = f"train.loss = {recipe.train.loss.name}"
    for key, label in (("train", dataset.train_label), ("eval", dataset.eval_label)):
        with blaming_key(f"dataset.{key}.ops", code_key=loss_key):
            dtype = np.dtype(label.dtype)
            if ignore_index is not None and not _can_hold(dtype, ignore_index):
                raise ValueError(
                    f"return labels of {dtype}, which can't hold dataset.ignore_index = "
                    f"{ignore_index}; must return whole numbers that can, or it must be null"
                )
            labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
            find_shapes(partial(compute_losses, step_config), logits, labels)


def _can_hold(dtype: np.dtype, label: int) -> bool:
    """Return whether a label fits a dtype of integers, and int32 too."""
    if not np.issubdtype(dtype, np.integer):
        return False
    return all(info.min <= label <= info.max for info in (np.iinfo(dtype), np.iinfo(np.int32)))


def check_vocabulary(draft: StepDraft) -> None:
    """Require an embedding row for each token of the texts: a token without one becomes NaN."""
    text, network = draft.dataset.text, draft.step_config.network
    if text is None or not isinstance(network, Network):
        return
    for layer in walk_layers(network.layers[:1]):
        num_rows = getattr(layer, "vocabulary", text.vocabulary)
        if isinstance(num_rows, int) and num_rows < text.vocabulary:
            model = draft.recipe.model
            of_layer = f"model {model.name}: layer {layer.name}: "
            key = "model." if hasattr(model, "vocabulary") else of_layer
            problem = f"must be at least {text.vocabulary}, the number of tokens of the texts"
            raise RecipeError(f"{key}vocabulary = {num_rows}: {problem}")


def check_rows(draft: StepDraft) -> None:
    """Require a row of an imported network's tables for each token that no map op changes."""
    dataset = draft.dataset
    network = draft.step_config.network
    if not isinstance(network, RowLookupNetwork):
        return
    vocabulary = None if dataset.text is None else dataset.text.vocabulary
    mapped = {"train": dataset.train_ops, "eval": dataset.eval_ops}
    for key, split in (("train", dataset.train), ("eval", dataset.whole_eval)):
        with blaming_key(f"model {draft.recipe.model.name} and dataset.{key}"):
            if not mapped[key]:
                network.require_rows(dataset.inputs, split, vocabulary)


def check_to_float(draft: StepDraft) -> None:
    """Require that each pattern of `train.to_float` matches a layer."""
    rules = draft.recipe.train.to_float
    if not rules:
        return
    listing = PathListing()
    traced = replace(draft.step_config, network=draft.step_config.network.clone(rules=(listing,)))
    with blaming_key("train.to_float"):
        find_shapes(lambda words: init_with_output(traced, words), draft.seed)
        require_covered([rule.pattern for rule in rules], list(listing.paths), "layers")


def check_jit_layers(draft: StepDraft) -> None:
    """Require that each pattern of `train.jit_layers` matches a layer with a module."""
    patterns = draft.recipe.train.jit_layers
    if not patterns:
        return
    # Imported here, since few recipes compile layers one by one.
    from pipeline.models.modules.jit_layers import record_module_paths

    paths: dict[LayerPath, None] = {}
    with blaming_key("train.jit_layers"):
        with record_module_paths(paths):
            find_shapes(lambda words: init_with_output(draft.step_config, words), draft.seed)
        require_covered(patterns, list(paths), "layers")


def check_shardings(draft: StepDraft) -> None:
    """Require that shardings of parameters fit the mesh, and constraints their layers."""
    if draft.recipe.parallel.mode == "semi_auto":
        # Imported here, since few runs shard parameters.
        from pipeline.stages.feature_facts import require_shardings

        require_shardings(draft.recipe, draft.step_config, draft.variables["params"], draft.seed)


def check_two_outputs(draft: StepDraft) -> None:
    """Refuse targets other than classes for a model that predicts two classes by one output."""
    model, targets = draft.recipe.model, draft.dataset.targets
    if model.two_outputs_are_classes and targets.task != "classification" and len(targets) > 1:
        problem = f"predicts classes, or one number or label, not {targets}"
        raise RecipeError(f"model {model.name}: {problem}")


def check_loss(draft: StepDraft) -> None:
    """Require a loss that fits the task."""
    loss, task = draft.recipe.train.loss, draft.dataset.targets.task
    if task not in loss.tasks:
        raise RecipeError(
            f"train.loss = {loss.name}: must be one for {task}: {', '.join(list_losses(task))}; "
            f"as in loss={USUAL_LOSSES[task]}"
        )


def check_class_metrics(draft: StepDraft) -> None:
    """Refuse metrics of classes for a task without classes."""
    task, metrics = draft.dataset.targets.task, draft.step_config.metrics
    names = ", ".join(metric.name for metric in metrics if isinstance(metric, ClassCountMetric))
    if names and task in ("regression", "multi_label", "matching", "sequence"):
        raise RecipeError(f"eval.metrics: {names} needs classes, and {task} has none; leave it out")


def check_metric_names(draft: StepDraft) -> None:
    """Require a separate name of each metric, and that the metrics that decide are among them."""
    targets = draft.dataset.targets
    standard = [*METRICS] if targets.task == "classification" else ["loss"]
    if targets.task == "classification" and len(targets) <= ALL_IN_TOP5:
        standard.remove("top5")
    names = [*standard, *(metric.name for metric in draft.step_config.metrics)]
    if duplicates := sorted({name for name in names if names.count(name) > 1}):
        problem = f"{targets.task} has {', '.join(duplicates)} already; leave it out"
        raise RecipeError(f"eval.metrics: {problem}")
    for key, metric in list_deciding_metrics(draft.recipe).items():
        if metric is not None and metric not in names:
            problem = f"must be a metric of {targets.task}: {', '.join(names)}"
            raise RecipeError(f"{key} = {metric}: {problem}")


def check_ledger(draft: StepDraft) -> None:
    """Require one class a sample for the ledger, and ops that don't mix samples."""
    if not draft.recipe.train.ledger:
        return
    targets = draft.dataset.targets
    key = "train.ledger = true: must be false"
    if targets.task != "classification" or draft.dataset.label_positions or len(targets) < 2:
        raise RecipeError(f"{key} unless each sample has one of several classes, not {targets}")
    if place := _find_train_op(draft, lambda op: isinstance(op, BatchOp)):
        raise RecipeError(f"{key} with {place}, which mixes labels")


def _find_train_op(draft: StepDraft, is_meant: Callable[[MapOp], bool]) -> str | None:
    """Return the key and name of the recipe's first op of training that is meant; None without."""
    ops = draft.dataset.train_ops
    # Ops that encode a table or series precede the recipe's.
    ops = ops[len(ops) - len(draft.recipe.dataset.train.ops) :]
    places = (f"dataset.train.ops.{n} ({op.name})" for n, op in enumerate(ops) if is_meant(op))
    return next(places, None)


def check_members(draft: StepDraft) -> None:
    """Require that no feature reads one output for each sample of a network with members."""
    step_config = draft.step_config
    if not draft.recipe.model.has_members:
        return
    moments = ("change_outputs", "read_samples")
    readers = [feature.name for moment in moments for feature in step_config.list_acting(moment)]
    if readers:
        raise RecipeError(
            f"model.members = {getattr(draft.recipe.model, 'members', None)}: must be 1 with "
            f"{', '.join(dict.fromkeys(readers))}, which reads one output for each sample"
        )


def check_metrics(draft: StepDraft) -> None:
    """Require that metrics accept the network's outputs, and that their sums keep their shapes."""
    step_config = draft.step_config
    dataset = draft.dataset
    batch = dataset.eval_order.batch_size
    label = dataset.eval_label
    logits = jax.ShapeDtypeStruct((batch, *draft.outputs), np.float32)
    labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
    mask = jax.ShapeDtypeStruct((batch,), np.bool_)
    label_mask = find_shapes(partial(make_label_mask, step_config), labels)
    for position, metric in enumerate(step_config.metrics):
        with blaming_key(f"eval.metrics.{position} ({metric.name})"):
            sums = find_shapes(partial(zero_sums, len(step_config.targets), (metric,)))
            add = partial(add_metric_sums, metrics=(metric,))
            find_shapes(add, sums, logits=logits, labels=labels, mask=mask, where=label_mask)


def check_gradients(draft: StepDraft) -> None:
    """Require that a custom gradient rule keeps the shapes of the backward pass's results."""
    feature = draft.step_config.find(GradientRule)
    if feature is None:
        return
    trained, _ = split_params(draft.state.params, draft.step_config.frozen)
    with blaming_key(f"train.gradients = {draft.recipe.train.gradients.name}"):
        require_same_shapes(feature.compute, trained, (draft.state.step, draft.state.collections))


def check_listed_features(draft: StepDraft) -> None:
    """Require that the features that the recipe lists keep the form of their states."""
    recipe = draft.recipe
    if not recipe.train.features:
        return
    step_config = replace(draft.step_config, shards=None)
    batch = shape_batch(draft.dataset.train, count_microbatches(step_config.features))
    groups = len(recipe.train.rate_columns)
    rates = jax.ShapeDtypeStruct((1, 1 + groups) if groups else (1,), np.float32)
    with blaming_key("train.features"):
        require_same_form(step_config, draft.state, batch, rates)


def check_curvature(draft: StepDraft) -> None:
    """Require that an optimizer of curvature can observe the layers of a custom network."""
    optimizer = draft.recipe.train.optimizer
    if optimizer.curvature() is not None and not isinstance(draft.step_config.network, Network):
        _trace_gradients(draft, f"train.optimizer = {optimizer.name}")


def _trace_gradients(draft: StepDraft, key: str) -> None:
    """Trace the gradients of a batch on one device. Raises RecipeError, which blames a key."""
    step_config = replace(draft.step_config, shards=None)
    batch = shape_batch(draft.dataset.train, count_microbatches(step_config.features))
    with blaming_key(key):
        find_shapes(partial(compute_step_gradients, step_config), draft.state, batch)


def check_privacy(draft: StepDraft) -> None:
    """Refuse a network that mixes samples, or whose gradients can't be separated by sample."""
    if draft.recipe.privacy is None:
        return
    if not isinstance(draft.step_config.network, Network):
        raise RecipeError(
            f"model {draft.recipe.model.name}: must be a list of layers with privacy, so that the "
            "gradients of samples can be separated"
        )
    if jax.tree.leaves(draft.state.collections):
        raise RecipeError(
            f"model {draft.recipe.model.name}: has batch norm, which mixes the samples of a batch; "
            "must have group_norm or layer_norm with privacy"
        )
    _trace_gradients(draft, "privacy")


def check_short_batch(draft: StepDraft) -> None:
    """Refuse a short batch whose padding would enter batch statistics, or be mixed with samples."""
    short = draft.dataset.train_order.short_batch
    if not short:
        return
    recipe = draft.recipe
    key = "dataset.train.drop_remainder = false:"
    samples = f"{short} of {recipe.train.batch_size} samples"
    problems = []
    if jax.tree.leaves(draft.state.collections):
        problems.append(
            f"{key} the last batch would hold {samples} and its padding would enter the batch "
            f"statistics of {recipe.model.name}; must be true for this network"
        )
    if place := _find_train_op(draft, lambda op: isinstance(op, BatchOp)):
        problems.append(
            f"{key} a last batch would hold {samples}, and {place} would mix its padding with "
            "them; must be true with this op"
        )
    if problems:
        raise RecipeError(problems)


def check_buckets(draft: StepDraft) -> None:
    """Refuse a network that can't compute images of all buckets."""
    if not draft.step_config.padding.buckets:
        return
    # A single sample can't be split into shards.
    step = make_train_step(replace(draft.step_config, shards=None))
    batch = shape_batch(draft.dataset.eval, 1)
    try:
        find_shapes(step.evaluate, draft.state, batch, find_shapes(step.zero_sums))
    except (ValueError, *UNTRACEABLE) as error:
        raise RecipeError(
            f"dataset.buckets: the network can't read all of them: {first_line(error)}; use one "
            "bucket, or a network that averages over positions before its dense layers"
        ) from error


def check_drawn_sizes(draft: StepDraft) -> None:
    """Refuse a network that can't compute all sizes of images that a map op draws."""
    step_config = draft.step_config
    # Only one op of a list can draw sizes.
    key = _find_train_op(draft, lambda op: op.choices > 1)
    if key is None:
        return
    if draft.recipe.train.optimizer.curvature() is not None:
        problem = "can't be used with an optimizer that reads the inputs of layers; use another"
        raise RecipeError(f"{key}: {problem}")
    num_shards = 1 if step_config.shards is None else step_config.shards.count
    batch_size = compute_batch_multiple(count_microbatches(step_config.features), num_shards)
    batch = shape_batch(draft.dataset.train, batch_size)
    for number in range(count_choices(step_config.train_ops)):
        ops = select_variants(step_config.train_ops, number)
        sized = replace(step_config, train_ops=ops, shards=None)
        try:
            find_shapes(partial(compute_step_gradients, sized), draft.state, batch)
        except (ValueError, *UNTRACEABLE) as error:
            raise RecipeError(
                f"{key}: the network can't read all sizes: {first_line(error)}; use a network "
                "that averages over positions before its dense layers"
            ) from error


def check_parameters(draft: StepDraft) -> None:
    """Refuse a network with more than `MAX_PARAMETERS` parameters."""
    if sum(leaf.size for leaf in jax.tree.leaves(draft.state.params)) > MAX_PARAMETERS:
        problem = f"must have at most {MAX_PARAMETERS:,} parameters"
        raise RecipeError(f"model {draft.recipe.model.name}: {problem}")


LAYER_CHECKS = (check_labels, check_vocabulary, check_rows, check_to_float, check_jit_layers)
TASK_CHECKS = (
    check_shardings,
    check_two_outputs,
    check_loss,
    check_class_metrics,
    check_metric_names,
    check_ledger,
    check_members,
)
STATE_CHECKS = (
    check_gradients,
    check_listed_features,
    check_curvature,
    check_privacy,
    check_short_batch,
    check_buckets,
    check_drawn_sizes,
    check_parameters,
)
"""Groups of checks, in this order: a problem of one group would cause others in later groups."""
