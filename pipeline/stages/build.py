"""Build: make the pure functions of a training step of network, loss, optimizer and schedule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
from flax import linen as nn

from pipeline.config.checks import wanted_metrics
from pipeline.config.precision import level_of, loss_scale_of, precision_of
from pipeline.config.recipe import Recipe
from pipeline.config.run_length import schedule_run
from pipeline.core.errors import RecipeError
from pipeline.core.files.value_text import show
from pipeline.core.reporter import Reporter
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset import Dataset
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.padding.buckets import in_ascending_order
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import encoded_features
from pipeline.data.targets import Targets
from pipeline.engine.schedule import RunSchedule
from pipeline.models.imported.imported_network import ImportedNetwork
from pipeline.models.imported.with_lowerings import lowers_itself
from pipeline.models.layers.path_patterns import Path, require_covered
from pipeline.models.layers.precision import PathListing, ToFloat
from pipeline.models.layers.tokens import Lookup
from pipeline.models.lowerings.problem.lowering import DEFAULTS
from pipeline.models.modules.jit_layers import list_layers
from pipeline.models.modules.standard import Network
from pipeline.stages.blame import blaming_key
from pipeline.stages.data_buckets import refuse_buckets_that_do_not_fit
from pipeline.stages.drawn_sizes import refuse_sizes_that_do_not_fit
from pipeline.stages.fine_tuning import fine_tuned
from pipeline.stages.learning_rates import learning_rates
from pipeline.training.class_metrics import ClassCountMetric
from pipeline.training.freezing import config_at
from pipeline.training.losses import label_mask, sample_losses
from pipeline.training.metric_names import METRICS
from pipeline.training.metrics import ALL_IN_TOP5, add_own, zero_sums
from pipeline.training.parallel.cuts import cuts_of, ranks_of_layers
from pipeline.training.parallel.shards import Shards, shards_of
from pipeline.training.part_specs import MetricSpec, losses_for
from pipeline.training.state import StepConfig, TrainState, split
from pipeline.training.step import TrainStep, initial_state, initial_variables, make_train_step
from pipeline.training.target_metrics import metrics_of

MAX_PARAMETERS = 10**13
MAX_LABELS = 2**31 - 1
"""Evaluation counts in int32."""


@dataclass(frozen=True)
class Built:
    """A training step, its run schedule, its learning rates and its seed."""

    parts: StepConfig
    run_schedule: RunSchedule
    learning_rates: np.ndarray
    seed: np.ndarray
    state: TrainState
    """Shapes and dtypes only; no arrays."""
    parameters: int
    parameter_bytes: int
    single_steps: bool = False
    """Whether its programs are to have no loop over steps, which would slow them down."""

    @property
    def step(self) -> TrainStep:
        """Make the pure functions of the step, for one device."""
        return make_train_step(self.parts)

    def step_on(self, shards: Shards | None) -> TrainStep:
        """Make the pure functions of the step, for the devices that share the shards.

        Raises RecipeError for batch statistics of all devices in a network that has none of its
        own.
        """
        parts = replace(self.parts, shards=shards)
        if shards is not None and shards.sync_batch_norm and shards.axis is not None:
            if not isinstance(parts.network, Network):
                raise RecipeError(
                    ["parallel.sync_batch_norm = true: must be false for a model without layers"]
                )
            parts = replace(parts, network=parts.network.clone(batch_axis=shards.axis))
        return make_train_step(parts)


def build(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> Built:
    """Build from shapes alone, without any weights. Raises RecipeError where parts don't fit."""
    run = schedule_run(recipe.train, dataset.train_order.steps_per_pass)
    images, ops = dataset.image, (dataset.train_ops, dataset.eval_ops)
    parts = parts_of(recipe, dataset.targets, images, *ops, dataset.train_images)
    seed = seed_words(recipe.seed)
    with blaming_key(f"model {recipe.model.name}"):
        logits, variables = jax.eval_shape(lambda words: initial_variables(parts, words), seed)
        _check_outputs(logits.shape[1:], dataset)
    _check_labels(recipe, dataset, parts, logits.shape[1:])
    _check_vocabulary(dataset, parts.network)
    with blaming_key("train.to_float"):
        _require_matches(recipe.train.to_float, parts, seed)
    with blaming_key("train.jit_layers"):
        _require_layers(recipe.train.jit_layers, parts, seed)
    parts = fine_tuned(recipe, parts, variables, run.steps_per_pass, seed)
    cuts = cuts_of(recipe.parallel)
    _refuse_to_observe(recipe, parts)
    if cuts is not None and recipe.parallel.mode == "semi_auto":
        with blaming_key("parallel.specs"):
            parallel = recipe.parallel
            cuts.require_fit(variables["params"], parallel.mesh_sizes, parallel.batch_axes)
        with blaming_key("parallel.constraints"):
            if cuts.constraints:
                initial = partial(jax.eval_shape, partial(initial_variables, parts))
                cuts.require_layers(ranks_of_layers(partial(initial, seed)))
    _check_task(recipe, dataset, parts.metrics)
    _check_metrics(parts, dataset, logits.shape[1:])
    with blaming_key("train.optimizer"):
        state = jax.eval_shape(lambda initial: initial_state(parts, initial), variables)
    with blaming_key(f"train.gradients = {recipe.train.gradients.name}"):
        _check_gradients(parts, state)
    _refuse_padding_into_statistics(recipe, dataset, state)
    _refuse_padding_into_mixtures(recipe, dataset)
    refuse_buckets_that_do_not_fit(parts, state, dataset.eval)
    refuse_sizes_that_do_not_fit(parts, state, dataset.train)
    leaves = jax.tree.leaves(state.params)
    parameters = sum(leaf.size for leaf in leaves)
    if parameters > MAX_PARAMETERS:
        problem = f"has more than {MAX_PARAMETERS:,} parameters, which nothing holds"
        raise RecipeError([f"model {recipe.model.name}: {problem}"])
    built = Built(
        parts=parts,
        run_schedule=run,
        learning_rates=learning_rates(recipe.train, run),
        seed=seed,
        state=state,
        parameters=parameters,
        parameter_bytes=sum(leaf.size * leaf.dtype.itemsize for leaf in leaves),
    )
    reporter.stage("build", _line(recipe, built))
    if level_of(recipe) != "O0" or recipe.train.to_float:
        reporter.stage("precision", _precision_line(recipe))
    return built


def parts_of(
    recipe: Recipe,
    targets: Targets,
    image: ColumnSpec,
    train_ops: tuple[MapOp, ...],
    eval_ops: tuple[MapOp, ...],
    train_images: tuple[ColumnSpec, ...] = (),
) -> StepConfig:
    """Return the configuration of a recipe's step, for images as the map ops leave them.

    `train_images` are those of training where an op draws their size.
    """
    train, ignored = recipe.train, recipe.dataset.ignore_index
    with blaming_key(f"train.loss = {train.loss.name}"):
        loss = train.loss.fitted(targets).build()
    with blaming_key(f"train.optimizer = {train.optimizer.name}"):
        optimizer = optax.chain(train.clip.build(), train.optimizer.build())
    with blaming_key(f"train.gradients = {train.gradients.name}"):
        gradients = None if train.gradients.name == "plain" else train.gradients.build()
    network = typed_network(recipe, len(targets), encoded_features(train_ops))
    # Eager mode runs the network as it was written. An imported one is traced in any case.
    traced = train.mode != "eager" or isinstance(network, ImportedNetwork)
    return StepConfig(
        network=network,
        lowerings=None if lowers_itself(network) or not traced else DEFAULTS,
        image=image,
        classes=len(targets),
        task=targets.task,
        class_counts=targets.counts,
        train_images=train_images,
        train_ops=train_ops,
        eval_ops=eval_ops,
        loss=loss,
        ignore_index=ignored,
        hardest_share=train.loss.hardest_share,
        reduction=train.loss.reduction,
        optimizer=optimizer,
        curvature=train.optimizer.curvature(),
        loss_scale=loss_scale_of(recipe),
        init_rules=recipe.model.init.rules,
        frozen=train.freeze,
        fix_statistics=train.freeze_statistics == "frozen",
        rate_groups=tuple(rule.pattern for rule in train.lr_rules),
        accumulate=train.accumulate_steps,
        gradients=gradients,
        metrics=(
            *metrics_of(targets, ignored),
            *(m.ignoring(ignored) for m in recipe.eval.metrics),
        ),
        average=None if train.ema.decay is None else train.ema,
        on_nan=train.on_nan,
        buckets=in_ascending_order(recipe.dataset.buckets or ()),
        padding_mask=recipe.dataset.padding_mask,
        shards=shards_of(recipe.parallel, train.batch_size, devices=1),
    )


def typed_network(recipe: Recipe, classes: int, features: int | None = None) -> nn.Module:
    """Return the network, each layer in the dtype that the recipe says; `features` are those of
    the table that it reads, if any.

    Raises RecipeError where the network is no list of layers and some dtypes are to differ.
    """
    precision = precision_of(recipe)
    with blaming_key(f"model {recipe.model.name}"):
        model = recipe.model.for_table(features)
        network = model.build(classes, precision.dtype)
    if recipe.dataset.padding_mask and isinstance(network, Network):
        network = network.clone(padding_mask=True)
    if isinstance(network, ImportedNetwork):
        network = network.clone(seed=recipe.seed)
    if isinstance(network, Network) and recipe.train.freeze_statistics != "none":
        of_frozen = recipe.train.freeze_statistics == "frozen"
        network = network.clone(fixed_statistics=recipe.train.freeze if of_frozen else ("*",))
    if not precision.rules:
        return network
    key = "to_float" if recipe.train.to_float else "precision"
    with blaming_key(f"train.{key}"):
        if not hasattr(network, "rules"):
            raise ValueError(
                f"{recipe.model.name} is no list of layers, so that all of it computes in one "
                "type; must be O0, O3 or bf16, and to_float []"
            )
    return network.clone(rules=precision.rules)


def _require_matches(rules: Sequence[ToFloat], parts: StepConfig, seed: np.ndarray) -> None:
    """Raise ValueError for a pattern that no layer matches."""
    if not rules:
        return
    listing = PathListing()
    traced = replace(parts, network=parts.network.clone(rules=(listing,)))
    jax.eval_shape(lambda words: initial_variables(traced, words), seed)
    require_covered([rule.pattern for rule in rules], list(listing.paths), "layers")


def _require_layers(patterns: Sequence[str], parts: StepConfig, seed: np.ndarray) -> None:
    """Raise ValueError for a pattern that no layer with a module of its own matches."""
    if not patterns:
        return
    paths: dict[Path, None] = {}
    with nn.intercept_methods(list_layers(paths)):
        jax.eval_shape(lambda words: initial_variables(parts, words), seed)
    require_covered(patterns, list(paths), "layers")


def _check_outputs(outputs: tuple[int, ...], dataset: Dataset) -> None:
    """Require one logit for each class, once for each label of a sample.

    Raises ValueError that says what the network must end in.
    """
    wanted = len(dataset.targets)
    if outputs[-1] != wanted:
        if dataset.targets.task == "classification":
            raise ValueError(
                f"the network ends in {outputs[-1]} outputs, and {wanted} classes are to be told "
                "apart"
            )
        raise ValueError(
            f"the network ends in {outputs[-1]} outputs, and {dataset.targets} are to be predicted"
        )
    if len(outputs) > 1 and not dataset.label_positions:
        raise ValueError(
            f"the network ends in shape {('batch', *outputs)}, not (batch, classes), and a label "
            "is one class; end it in global_avg_pool or flatten, and dense"
        )
    labels = len(dataset.eval) * math.prod(outputs[:-1])
    if labels > MAX_LABELS:
        raise ValueError(
            f"the evaluation split has {labels:,} labels, and {MAX_LABELS:,} can be counted; "
            "set eval.samples to evaluate fewer samples"
        )


def _check_labels(
    recipe: Recipe, dataset: Dataset, parts: StepConfig, outputs: tuple[int, ...]
) -> None:
    """Require that the loss takes the labels of both splits, for `outputs` per sample."""
    batch = recipe.train.batch_size
    logits = jax.ShapeDtypeStruct((batch, *outputs), np.float32)
    for key, label in (("train", dataset.train_label), ("eval", dataset.eval_label)):
        with blaming_key(
            f"dataset.{key}.ops", untraceable=f"train.loss = {recipe.train.loss.name}"
        ):
            _require_integer_labels_to_ignore(parts, label)
            labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
            jax.eval_shape(partial(sample_losses, parts), logits, labels)


def _check_vocabulary(dataset: Dataset, network: nn.Module) -> None:
    """Require a row for each token of the texts: numbers of others would give NaN."""
    first = network.layers[0] if isinstance(network, Network) and network.layers else None
    if dataset.text is None or not isinstance(first, Lookup):
        return
    wanted, rows = dataset.text.vocabulary, first.vocabulary
    if isinstance(rows, int) and rows < wanted:
        raise RecipeError(
            [f"model.vocabulary = {rows}: must be {wanted} at least, the tokens of the texts"]
        )


def _check_task(recipe: Recipe, dataset: Dataset, metrics: Sequence[MetricSpec]) -> None:
    """Require a loss for what is predicted, and metrics that evaluations of it have."""
    task, loss = dataset.targets.task, recipe.train.loss
    if (
        recipe.model.two_outputs_are_classes
        and task != "classification"
        and len(dataset.targets) > 1
    ):
        problem = f"predicts classes, or one number or label, and not {dataset.targets}"
        raise RecipeError([f"model {recipe.model.name}: {problem}"])
    if task not in loss.tasks:
        fitting = ", ".join(losses_for(task))
        raise RecipeError([f"train.loss = {loss.name}: must be one for {task}: {fitting}"])
    of_classes = [metric.name for metric in metrics if isinstance(metric, ClassCountMetric)]
    if of_classes and task in ("regression", "multi_label"):
        problem = f"{', '.join(of_classes)} is of classes, which {task} has not; leave it out"
        raise RecipeError([f"eval.metrics: {problem}"])
    names = [metric.name for metric in metrics]
    standard = [*METRICS] if task == "classification" else ["loss"]
    if task == "classification" and len(dataset.targets) <= ALL_IN_TOP5:
        standard.remove("top5")
    known_names = [*standard, *names]
    doubled = sorted({name for name in known_names if known_names.count(name) > 1})
    if doubled:
        raise RecipeError([f"eval.metrics: {task} has {', '.join(doubled)} already; leave it out"])
    for key, metric in wanted_metrics(recipe).items():
        if metric is not None and metric not in known_names:
            raise RecipeError([f"{key} = {metric}: {task} has {', '.join(known_names)}"])


def _check_metrics(parts: StepConfig, dataset: Dataset, outputs: tuple[int, ...]) -> None:
    """Require that metric parts take what the network gives, and return sums like their zeros."""
    batch = dataset.eval_order.batch_size
    label = dataset.eval_label
    logits = jax.ShapeDtypeStruct((batch, *outputs), np.float32)
    labels = jax.ShapeDtypeStruct((batch, *label.shape), label.dtype)
    mask = jax.ShapeDtypeStruct((batch,), np.bool_)
    counted = jax.eval_shape(partial(label_mask, parts), labels)
    for position, metric in enumerate(parts.metrics):
        with blaming_key(f"eval.metrics.{position} ({metric.name})"):
            sums = jax.eval_shape(partial(zero_sums, parts.classes, (metric,)))
            jax.eval_shape(
                lambda sums, *batch, own=metric: add_own(sums, (own,), *batch),
                *(sums, logits, labels, mask, counted),
            )


def _check_gradients(parts: StepConfig, state: TrainState) -> None:
    """Require that gradients of one's own are like the parameters, beside what one pass gives."""
    rule = parts.gradients
    if rule is None:
        return
    trained, _ = split(state.params, parts.frozen)
    result = state.loss_scale, state.batch_stats
    found, passed = jax.eval_shape(
        lambda trained, result, key: rule(lambda parameters: (parameters, result), trained, key),
        *(trained, result, jax.random.key(0)),
    )
    if jax.tree.map(np.shape, found) != jax.tree.map(np.shape, trained):
        shapes = jax.tree.map(np.shape, found)
        raise ValueError(f"gives gradients of shapes {show(shapes)}; must be like the parameters")
    if jax.tree.map(np.shape, passed) != jax.tree.map(np.shape, result):
        raise ValueError("must return what else the backward pass gave, beside the gradients")


def _require_integer_labels_to_ignore(parts: StepConfig, label: ColumnSpec) -> None:
    ignored, dtype = parts.ignore_index, np.dtype(label.dtype)
    if ignored is None or (
        np.issubdtype(dtype, np.integer)
        and np.iinfo(dtype).min <= ignored <= min(np.iinfo(dtype).max, MAX_LABELS)
    ):
        return
    raise ValueError(
        f"leave labels of {dtype}, among which there is no dataset.ignore_index = {ignored}; leave "
        "them whole numbers that it is one of, or set it to null"
    )


def _refuse_to_observe(recipe: Recipe, parts: StepConfig) -> None:
    """Refuse an optimizer that reads the inputs of layers for a network that hides them."""
    if parts.curvature is not None and isinstance(parts.network, ImportedNetwork):
        optimizer = recipe.train.optimizer.name
        raise RecipeError(
            [
                f"train.optimizer.name = {optimizer}: looks at what the layers of a list see, and "
                f"{recipe.model.name} is no list of layers; must be another one, such as momentum"
            ]
        )


def _refuse_padding_into_mixtures(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a short batch before an op that would mix its padding with its samples."""
    short = dataset.train_order.short_batch
    for position, op in enumerate(dataset.train_ops):
        if short and isinstance(op, BatchOp):
            raise RecipeError(
                [
                    f"dataset.train.drop_remainder = false: a last batch would hold {short} of "
                    f"{recipe.train.batch_size} samples, and dataset.train.ops.{position} "
                    f"({op.name}) would mix its padding with them; must be true with this op"
                ]
            )


def _refuse_padding_into_statistics(recipe: Recipe, dataset: Dataset, state: Any) -> None:
    """Refuse a short batch with batch statistics: they would include its padding."""
    short = dataset.train_order.short_batch
    if state.batch_stats and short:
        raise RecipeError(
            [
                f"dataset.train.drop_remainder = false: the last batch would hold {short} of "
                f"{recipe.train.batch_size} samples and its padding would enter the batch "
                f"statistics of {recipe.model.name}; must be true for this network"
            ]
        )


def _precision_line(recipe: Recipe) -> str:
    precision, scale = precision_of(recipe), loss_scale_of(recipe)
    types = ", ".join([precision.dtype, *(f"{rule.dtype} in {rule}" for rule in precision.rules)])
    return f"{level_of(recipe)}: {types}; loss scale {scale.name}, from {scale.initial:,g}"


def _line(recipe: Recipe, built: Built) -> str:
    run = built.run_schedule
    sink = f"sinks of {run.sink_steps:,}" if run.sink_steps else "no sinks"
    if recipe.train.sink and recipe.train.sink_size == "auto":
        sink = "sinks to be chosen"
    frozen = ""
    if built.parts.frozen:
        counts = [
            f"{_trained(built, 0):,} of them trained",
            *(f"{_trained(built, p.start):,} from step {p.start + 1}" for p in built.parts.phases),
        ]
        frozen = f", {', '.join(counts)}"
    return (
        f"{recipe.model.name}: {built.parameters:,} parameters{frozen}, "
        f"{built.parameter_bytes / 1e6:,.1f} MB; {run.total:,} steps, {sink}, "
        f"{run.total / run.steps_per_pass:,.2f} passes"
    )


def _trained(built: Built, step: int) -> int:
    """The number of parameters that are trained after a number of steps."""
    trained, _ = split(built.state.params, config_at(built.parts, step).frozen)
    return sum(leaf.size for leaf in jax.tree.leaves(trained))
