"""Build: make the pure functions of a training step from network, loss, optimizer and schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
import optax
from flax import linen as nn
from jax.extend.core import ClosedJaxpr

from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.config.resolved_settings import (
    count_total_steps,
    find_known_facts,
    find_late_phases,
    find_length_problems,
    find_warmup_problems,
    resolve_level,
    resolve_loss_scale,
    resolve_precision,
    schedule_run,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.value_text import count_noun
from pipeline.core.host.array_values import allow_reads, find_shapes, is_value_read
from pipeline.core.reporter import Reporter
from pipeline.data.columns import Targets
from pipeline.data.dataset_spec import MapOp, find_table_layout
from pipeline.data.inputs import Dataset, NetworkInputs
from pipeline.data.padding.buckets import NO_PADDING, Padding
from pipeline.data.random import seed_words
from pipeline.data.transform import has_constant_labels
from pipeline.engine.schedule import RunSchedule
from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.modules.network import Network, is_imported, lowers_itself
from pipeline.stages.build_checks import (
    LAYER_CHECKS,
    STATE_CHECKS,
    TASK_CHECKS,
    StepDraft,
    check_metrics,
    check_outputs,
    require_pair_inputs,
)
from pipeline.stages.key_errors import blaming_key, require_all
from pipeline.stages.step_features import (
    NO_INPUTS,
    FeatureInputs,
    make_feature_context,
    make_step_features,
    require_distinct,
)
from pipeline.training.component_specs import ScheduleSpec
from pipeline.training.features.freezing import get_freezing, select_phase
from pipeline.training.losses import TrainingObjective
from pipeline.training.parallel.parallel_spec import Shards, make_shards
from pipeline.training.parallel.state_sharing import StateSharing
from pipeline.training.probabilities import find_probabilities
from pipeline.training.state import TrainState, count_bytes, split_params
from pipeline.training.step import TrainStep, make_train_step
from pipeline.training.step_config import StepConfig, TracedLowerings
from pipeline.training.target_metrics import list_metrics
from pipeline.training.update import init_state, init_with_output

if TYPE_CHECKING:
    from pipeline.data.tables.encode_table import TableLayout
    from pipeline.training.privacy.budget import Budget


@dataclass(frozen=True)
class Built:
    """A training step, its run schedule, its learning rates and its seed."""

    step_config: StepConfig
    run_schedule: RunSchedule
    learning_rates: np.ndarray
    """The result of `make_learning_rates`."""
    seed: np.ndarray
    """uint32 (2,)."""
    state: TrainState
    """Shapes and dtypes."""
    parameters: int
    parameter_bytes: int
    privacy: Budget | None = None
    """None if the run isn't private."""
    train_inputs: tuple[NetworkInputs, ...] = ()
    """Inputs of the network in training, for each size that an op draws; empty if all samples have
    the same size."""
    single_steps: bool = False
    """Whether programs have no loop over steps, since it would slow them down."""
    at_once: int = 1
    """Shards of a batch that programs compute at once."""

    @property
    def step(self) -> TrainStep:
        """Make the pure functions of the step, for one device."""
        return make_train_step(self.step_config)

    def step_on(self, shards: Shards | None, sharing: StateSharing | None = None) -> TrainStep:
        """Make the pure functions of the step, for devices that share the shards of a batch.

        They share the state too unless `sharing` is None. Raises RecipeError for
        `sync_batch_norm` with a network that isn't a list of layers.
        """
        if shards is not None:
            shards = replace(shards, at_once=self.at_once)
        step_config = replace(self.step_config, shards=shards, sharing=sharing)
        if shards is not None and shards.sync_batch_norm and shards.axis is not None:
            if not isinstance(step_config.network, Network):
                raise RecipeError(
                    "parallel.sync_batch_norm = true: must be false for a model without layers"
                )
            step_config = replace(
                step_config, network=step_config.network.clone(batch_axis=shards.axis)
            )
        return make_train_step(step_config)


def build(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> Built:
    """Build the step from shapes. Raises RecipeError if components don't fit."""
    with allow_reads(recipe.train.mode == "eager"):
        return _build(recipe, dataset, reporter)


def _build(recipe: Recipe, dataset: Dataset, reporter: Reporter) -> Built:
    """Build the step in a body of `allow_reads`."""
    schedule = _schedule_run(recipe, dataset.train_order.steps_per_epoch, reporter)
    # Learning rates and noise depend on the planned length, also if the run ends early.
    planned = replace(schedule, total=count_total_steps(recipe.train, schedule.steps_per_epoch))
    require_pair_inputs(recipe, dataset)
    step_config = make_step_config(
        recipe,
        dataset.targets,
        dataset.inputs,
        dataset.train_ops,
        dataset.eval_ops,
        dataset.padding,
    )
    privacy = None
    if recipe.privacy is not None:
        # Imported here, since few runs are private.
        from pipeline.stages.feature_facts import plan_privacy

        privacy = plan_privacy(recipe, dataset, planned.total, reporter)
    if recipe.eval.robustness:
        from pipeline.stages.feature_facts import require_attackable

        require_attackable(recipe, dataset)
    inputs = _make_feature_inputs(recipe, dataset, privacy)
    seed = seed_words(recipe.seed)
    with blaming_key(f"model {recipe.model.name}"):
        traced, (logits, variables) = _trace_network(step_config, seed)
    if traced and recipe.train.loss.reads_logits:
        _warn_of_probabilities(recipe, traced, reporter)
    step_config = fit_metrics(recipe, dataset, step_config, logits.shape[1:])
    draft = StepDraft(recipe, dataset, step_config, seed, logits.shape[1:], variables)
    check_outputs(draft)
    require_all(LAYER_CHECKS, draft)
    if recipe.train.features:
        context = make_feature_context(
            recipe, dataset, step_config, variables, planned, build_network
        )
        inputs = replace(inputs, context=context)
    step_config = _add_features(draft, inputs, schedule.steps_per_epoch)
    draft = replace(draft, step_config=step_config)
    require_all(TASK_CHECKS, draft)
    check_metrics(draft)
    with blaming_key("train.optimizer"):
        state = find_shapes(lambda initial: init_state(step_config, initial), variables)
    require_all(STATE_CHECKS, replace(draft, state=state))
    built = Built(
        step_config=step_config,
        run_schedule=schedule,
        learning_rates=make_learning_rates(recipe.train, planned),
        seed=seed,
        state=state,
        train_inputs=dataset.train_inputs,
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parameter_bytes=count_bytes(state.params),
        privacy=privacy,
    )
    reporter.print_stage("build", _format_line(recipe, built))
    if resolve_level(recipe) != "O0" or recipe.train.to_float:
        reporter.print_stage("precision", _format_precision(recipe))
    return built


def _warn_of_probabilities(recipe: Recipe, traced: ClosedJaxpr, reporter: Reporter) -> None:
    if ending := find_probabilities(traced):
        reporter.warn(
            f"model {recipe.model.name}: ends in {ending}, and train.loss = "
            f"{recipe.train.loss.name} reads outputs as logits; end in the values before it"
        )


def _schedule_run(recipe: Recipe, steps_per_epoch: int, reporter: Reporter) -> RunSchedule:
    """Return the run's schedule. Raises RecipeError for a length that doesn't fit the dataset.

    The rules about a recipe's length may not have known the dataset's size.
    """
    if problems := list(find_length_problems(recipe.train, steps_per_epoch)):
        raise RecipeError(problems)
    if find_known_facts(recipe) is None:
        # A length from the command line may be shorter than the warmup, so it isn't refused.
        for problem in find_warmup_problems(recipe.train, steps_per_epoch):
            reporter.warn(problem)
    for problem in find_late_phases(recipe.train, steps_per_epoch):
        reporter.warn(problem)
    return schedule_run(recipe.train, steps_per_epoch)


def fit_metrics(
    recipe: Recipe, dataset: Dataset, step_config: StepConfig, outputs: tuple[int, ...]
) -> StepConfig:
    """Return the configuration with the metrics for the samples that are evaluated, and for the
    shape of a sample's outputs."""
    splits = [dataset.eval, dataset.train] if recipe.eval.on_train else [dataset.eval]
    labels = [split.columns["label"] for split in splits]
    metrics = tuple(metric.fit_to_samples(labels, outputs) for metric in step_config.metrics)
    return replace(step_config, metrics=metrics)


def _make_feature_inputs(recipe: Recipe, dataset: Dataset, privacy: Budget | None) -> FeatureInputs:
    """Return what features of the step need besides the recipe."""
    pixel_scale = None
    if recipe.train.adversarial is not None:
        # Imported here, since few runs attack their images.
        from pipeline.stages.feature_facts import make_pixel_scale

        pixel_scale = make_pixel_scale(recipe, dataset, "train")
    return FeatureInputs(
        samples=len(dataset.train),
        privacy_rule=None if privacy is None else privacy.rule,
        pixel_scale=pixel_scale,
    )


def _add_features(draft: StepDraft, inputs: FeatureInputs, steps_per_epoch: int) -> StepConfig:
    """Return the step's configuration with the features that `inputs` and fine-tuning add. They
    replace the draft's, which were made without facts of the data."""
    recipe = draft.recipe
    step_config = draft.step_config
    if fine_tunes(recipe.train):
        from pipeline.stages.fine_tuning import plan_fine_tuning

        tuning = plan_fine_tuning(recipe, step_config, draft.variables, steps_per_epoch, draft.seed)
        step_config = tuning.apply(recipe, step_config, inputs)
    else:
        step_config = replace(step_config, features=make_step_features(recipe, inputs))
    require_distinct(step_config.features)
    return step_config


def fine_tunes(train: TrainSpec) -> bool:
    """Return whether parameters are frozen, or differ in their learning rates or optimizers."""
    is_changed = train.freeze_statistics != "none" or train.lr_decay_by_layer != 1.0
    return bool(is_changed or train.freeze or train.unfreeze or train.lr_rules or train.optimizers)


def _format_precision(recipe: Recipe) -> str:
    """Return the types of the layers and the loss scale as a line for the log."""
    precision = resolve_precision(recipe)
    scale = resolve_loss_scale(recipe)
    types = [precision.dtype, *(f"{rule.dtype} in {rule}" for rule in precision.rules)]
    scale_text = f"loss scale {scale.name}, from {scale.initial:,g}"
    return f"{resolve_level(recipe)}: {', '.join(types)}; {scale_text}"


def _trace_network(
    step_config: StepConfig, seed: np.ndarray
) -> tuple[ClosedJaxpr | None, tuple[Any, Any]]:
    """Return the trace of initialisation and a forward pass, and the shapes of logits and
    variables. The trace is None if the network reads values, which only eager mode allows."""

    def init(words: Any) -> tuple[Any, Any]:
        return init_with_output(step_config, words)

    try:
        return jax.make_jaxpr(init, return_shape=True)(seed)
    except Exception as error:  # custom code may wrap JAX's error
        if not is_value_read(error):
            raise
    return None, find_shapes(init, seed)


def make_step_config(
    recipe: Recipe,
    targets: Targets,
    inputs: NetworkInputs,
    train_ops: tuple[MapOp, ...],
    eval_ops: tuple[MapOp, ...],
    padding: Padding = NO_PADDING,
) -> StepConfig:
    """Return the configuration of a recipe's step, with the features that need no facts of the
    data; they suffice for shapes and initial variables."""
    train = recipe.train
    ignore_index = recipe.dataset.ignore_index
    with blaming_key(f"train.loss = {train.loss.name}"):
        loss = recipe.model.wrap_loss(train.loss.fit_to_targets(targets).build())
    with blaming_key(f"train.optimizer = {train.optimizer.name}"):
        optimizer = optax.chain(train.clip.build(), train.optimizer.build())
    features = make_step_features(recipe, NO_INPUTS)
    network = build_network(recipe, targets, find_table_layout(train_ops))
    for feature in train.features:
        network = feature.change_network(network)
    # Lowerings replace operations of a trace, and eager mode runs the code of the network itself.
    is_rewritten = train.mode != "eager" and not lowers_itself(network)
    metrics = () if has_constant_labels(eval_ops) else list_metrics(targets, ignore_index)
    return StepConfig(
        network=network,
        lowerings=TracedLowerings(DEFAULTS) if is_rewritten else None,
        inputs=inputs,
        targets=targets,
        train_ops=train_ops,
        eval_ops=eval_ops,
        objective=TrainingObjective(loss, train.loss.reduction, ignore_index),
        optimizer=optimizer,
        init_rules=recipe.model.init.rules,
        features=features,
        metrics=(*metrics, *(metric.ignore_label(ignore_index) for metric in recipe.eval.metrics)),
        padding=padding,
        shards=make_shards(recipe.parallel, train.batch_size, devices=1),
    )


def build_network(recipe: Recipe, targets: Targets, layout: TableLayout | None = None) -> nn.Module:
    """Return the network, each layer in the recipe's dtype.

    `layout` has the encoded columns of a table; None for other data. Raises RecipeError for
    settings that the network doesn't fit, such as dtypes of layers if it isn't a list of them.
    """
    precision = resolve_precision(recipe)
    with blaming_key(f"model {recipe.model.name}"):
        model = recipe.model.fit(layout, targets)
        network = model.build(len(targets), precision.dtype)
    if is_imported(network):
        network = network.clone(seed=recipe.seed)
    if isinstance(network, Network) and recipe.train.freeze_statistics != "none":
        patterns = recipe.train.freeze if recipe.train.freeze_statistics == "frozen" else ("*",)
        network = network.clone(fixed_statistics=patterns)
    if precision.products != "plain":
        with blaming_key("train.precision"):
            if not isinstance(network, Network):
                raise ValueError(
                    f"{recipe.model.name} isn't a list of layers, so its dense layers can't be "
                    "found; must be another level"
                )
        network = network.clone(products=precision.products)
    if not precision.rules:
        return network
    key = "to_float" if recipe.train.to_float else "precision"
    with blaming_key(f"train.{key}"):
        if not hasattr(network, "rules"):
            raise ValueError(
                f"{recipe.model.name} isn't a list of layers, so all of it computes in one type; "
                "must be O0, O3 or bf16, to_float [] and keep_batchnorm_fp32 null"
            )
    return network.clone(rules=precision.rules)


def _format_line(recipe: Recipe, built: Built) -> str:
    """Return the number of parameters and the length of a run as a line for the log."""
    run = built.run_schedule
    sink = "no sinks"
    if run.sink_steps:
        sink = f"sinks of {count_noun(run.sink_steps, 'step')}"
        sink = sink if run.sink_steps < run.total else "one sink"
    if recipe.train.chooses_sink:
        sink = "sinks to be chosen"
    frozen = ""
    if built.step_config.frozen:
        count_at = partial(count_trained, built.state.params, built.step_config)
        frozen = f", {count_at(0):,} of them trained"
        for phase in get_freezing(built.step_config).phases:
            frozen += f", {count_at(phase.start):,} from step {phase.start + 1}"
    epochs = run.total / run.steps_per_epoch
    length = f"{count_noun(run.total, 'step')}, {sink}, {epochs:,.2f} epochs"
    if recipe.train.deadline is not None:
        length = f"steps to be chosen for {recipe.train.deadline}, {sink}"
    return (
        f"{recipe.model.name}: {built.parameters:,} parameters{frozen}, "
        f"{built.parameter_bytes / 1e6:,.1f} MB; {length}"
    )


def count_trained(params: Any, step_config: StepConfig, step: int) -> int:
    """Return the number of parameters that are trained after `step` steps."""
    trained, _ = split_params(params, select_phase(step_config, step).frozen)
    return sum(leaf.size for leaf in jax.tree.leaves(trained))


def make_learning_rates(train: TrainSpec, run: RunSchedule) -> np.ndarray:
    """Return the rates of each update: float32 (total,), or (total, 1 + rules) with rules.

    Column 0 follows the main schedule. Then come the rules of `optimizers`, with the rates of their
    optimizers, and the rates of `lr_rules`, with the main rate times `factor`. A rule without a
    schedule follows the main schedule. Raises RecipeError if a schedule can't be tabulated.
    """

    def make_table(key: str, schedule: ScheduleSpec, lr: float) -> np.ndarray:
        try:
            return schedule.table(lr, run.total, run.steps_per_epoch)
        except ValueError as error:
            raise RecipeError(_format_rate_problem(key, error)) from error

    lr = train.optimizer.lr
    main = make_table("train.schedule", train.schedule, lr)
    if not train.rate_columns:
        return main
    columns = [main]
    for number, group in enumerate(train.optimizers):
        key = f"train.optimizers.{number}.schedule"
        columns.append(make_table(key, group.schedule or train.schedule, group.optimizer.lr))
    for number, rule in enumerate(train.lr_rules):
        key = f"train.lr_rules.{number}.schedule"
        table = main if rule.schedule is None else make_table(key, rule.schedule, lr)
        columns.append(table * np.float32(rule.factor))
    return np.stack(columns, axis=1)


def fingerprint_rate_files(train: TrainSpec) -> Mapping[str, Any]:
    """Return shape, dtype and sha256 of each file of learning rates, by the key of its schedule.

    Raises RecipeError with the problems of all files.
    """
    fingerprints = {}
    problems = []
    for key, schedule in train.schedules.items():
        try:
            fingerprint = schedule.fingerprint_file()
        except ValueError as error:
            problems.append(_format_rate_problem(key, error))
            continue
        if fingerprint is not None:
            fingerprints[key] = fingerprint
    if problems:
        raise RecipeError(problems)
    return fingerprints


def _format_rate_problem(key: str, error: ValueError) -> str:
    """Return the problem of a schedule, after the key of the schedule or of its file."""
    text = str(error)
    return f"{key}.{text}" if text.startswith("file = ") else f"{key}: {text}"
