"""Rules that relate several keys of a recipe. Each yields its problems, which begin with a key."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pipeline.config import device_checks
from pipeline.config.adapter_words import find_loop_problems
from pipeline.config.privacy_robustness_checks import check_privacy, check_robustness
from pipeline.config.recipe import STAGES, Recipe
from pipeline.config.resolved_settings import (
    check_deadline,
    check_one_length,
    count_total_steps,
    find_known_facts,
    find_length_problems,
    find_warmup_problems,
    list_deciding_metrics,
    resolve_level,
    resolve_precision,
)
from pipeline.core.errors import RecipeError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import show
from pipeline.core.registry import Spec
from pipeline.data.columns import ColumnSpec
from pipeline.data.order import Batching, count_shard_samples
from pipeline.data.transform import compute_column_specs, describe_unequal_shapes, fit_to_classes
from pipeline.training import target_metrics
from pipeline.training.metric_names import METRICS
from pipeline.training.parallel.microbatches import compute_batch_multiple
from pipeline.training.parallel.parallel_spec import MAX_DEVICES, count_shards

NON_METRICS = ("count", "step")
"""Keys of evals.jsonl that aren't metrics."""
Check = Callable[[Recipe], Iterator[str]]
CHECKS: list[Check] = [*device_checks.RULES, check_privacy, check_robustness, check_one_length]
"""All rules, in the order in which an error lists their problems; `rule` adds more below."""


def find_conflicts(recipe: Recipe, *, length_replaced: bool) -> list[str]:
    """Return the problems of all rules.

    With `length_replaced`, which is for a length from the command line, the run may end within its
    warmup.
    """
    checks = [check for check in CHECKS if not (length_replaced and check is check_warmup_length)]
    return [problem for check in checks for problem in check(recipe)]


def fit_to_processes(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe for a number of processes, by default with one device each. Raises
    RecipeError if this number of processes can't run the recipe."""
    if processes == 1:
        return recipe
    # A checked recipe may end within its warmup only if the command line has replaced its length.
    length_replaced = _has_problem(recipe, check_warmup_length)
    parallel = recipe.parallel
    if parallel.devices is None and parallel.mesh is None:
        if processes > MAX_DEVICES:
            problem = f"must be less than or equal to {MAX_DEVICES}"
            raise RecipeError([f"parallel.devices = {processes}: {problem}"])
        batch_size = recipe.train.batch_size
        if parallel.batch_per_device is not None:
            batch_size = parallel.batch_per_device * processes
        layout: dict[str, Any] = {"devices": processes}
        if parallel.shards is not None and "shards" not in parallel.model_fields_set:
            unset = parallel.model_copy(update={"devices": processes, "shards": None})
            layout["shards"] = count_shards(unset, batch_size)
        changes: dict[str, Spec] = {
            "parallel": parallel.model_copy(update=layout),
            "train": recipe.train.model_copy(update={"batch_size": batch_size}),
        }
        recipe = recipe.model_copy(update=changes)
    problems = find_conflicts(recipe, length_replaced=length_replaced)
    if not problems:
        problems = list(device_checks.check_processes(recipe, processes))
    if problems:
        raise RecipeError(problems)
    return recipe


def rule(check: Check) -> Check:
    """Register a rule for all recipes."""
    CHECKS.append(check)
    return check


def _count_known_steps(recipe: Recipe) -> int | None:
    """Return the steps of an epoch if they are known before the dataset is read, else None."""
    facts = find_known_facts(recipe)
    return None if facts is None else make_batching(recipe, facts.train_size).steps_per_epoch


def _has_problem(recipe: Recipe, *checks: Check) -> bool:
    return any(list(check(recipe)) for check in checks)


@rule
def check_length(recipe: Recipe) -> Iterator[str]:
    """Training has at most `MAX_STEPS` steps, and `train.end_step` is one of them."""
    if _has_problem(recipe, check_one_length, check_batch_size):
        return
    yield from find_length_problems(recipe.train, _count_known_steps(recipe))


rule(check_deadline)


@rule
def check_sink_size(recipe: Recipe) -> Iterator[str]:
    """A sink is one epoch (-1), a positive number of batches, or auto."""
    size = recipe.train.sink_size
    if size != "auto" and (size == 0 or size < -1):
        yield (
            f"train.sink_size = {size}: must be a number of steps, -1 (a sink an epoch) or auto; "
            "train.sink=false turns sinks off"
        )


@rule
def check_adapter_loops(recipe: Recipe) -> Iterator[str]:
    """`train.iterations_per_loop` follows the rules of TensorFlow's adapter."""
    if _has_problem(recipe, check_one_length, check_length, check_batch_size):
        return
    total = recipe.train.steps
    steps_per_epoch = _count_known_steps(recipe)
    if steps_per_epoch is not None and recipe.train.deadline is None:
        total = count_total_steps(recipe.train, steps_per_epoch)
    yield from find_loop_problems(recipe.train, total)


@rule
def check_device(recipe: Recipe) -> Iterator[str]:
    """The device computes in the types of all layers, and the recipe's number of devices exists."""
    precision = resolve_precision(recipe)
    for dtype in precision.dtypes:
        if (problem := recipe.device.find_dtype_problem(dtype)) is not None:
            is_rule = any(rule.dtype == dtype for rule in recipe.train.to_float)
            key = "to_float" if is_rule else f"precision = {recipe.train.precision}"
            yield f"train.{key}: {problem}"
    parallel = recipe.parallel
    num_devices = 1 if parallel.mode == "none" else parallel.num_devices
    problem = recipe.device.find_count_problem(num_devices)
    if problem is not None:
        key = "parallel.devices" if parallel.mesh is None else "parallel.mesh"
        yield f"{key} = {num_devices}: {problem}"


@rule
def check_type_source(recipe: Recipe) -> Iterator[str]:
    """Either a level or `to_float` sets the types of layers, as in MindSpore."""
    level = resolve_level(recipe)
    if recipe.train.to_float and level != "O0":
        yield (
            f"train.to_float: conflicts with train.precision = {recipe.train.precision}, which is "
            f"{level} on {recipe.device.name} and types every layer; use one of them: "
            "train.precision=O0, or train.to_float=[]"
        )


@rule
def check_microbatches(recipe: Recipe) -> Iterator[str]:
    """Accumulation splits batches into equal microbatches."""
    train = recipe.train
    if train.batch_size % compute_batch_multiple(train.accumulate_steps):
        yield (
            f"train.accumulate_steps = {train.accumulate_steps}: must divide train.batch_size = "
            f"{train.batch_size}, which is the number of samples of an update"
        )


@rule
def check_remat(recipe: Recipe) -> Iterator[str]:
    """Recomputation needs a compiled step, and an optimizer that doesn't read layers."""
    train = recipe.train
    problem = f"train.remat = {train.remat}: must be none with"
    if train.remat != "none" and train.optimizer.observes_layers:
        yield f"{problem} {train.optimizer.name}, which looks into layers"
    if train.remat != "none" and train.mode == "eager":
        yield f"{problem} train.mode = eager, which keeps all results"
    if train.remat_bytes is not None and train.remat != "auto":
        yield f"train.remat_bytes = {train.remat_bytes}: must be null unless train.remat is auto"


@rule
def check_compiled_layers(recipe: Recipe) -> Iterator[str]:
    """`jit_layers` needs eager mode, and an optimizer that doesn't read layers."""
    train = recipe.train
    problem = f"train.jit_layers = {show(list(train.jit_layers))}: must be [] with"
    if train.jit_layers and train.mode != "eager":
        yield f"{problem} train.mode = {train.mode}, which compiles every layer"
    if train.jit_layers and train.optimizer.observes_layers:
        yield f"{problem} {train.optimizer.name}, which looks into layers"


@rule
def check_listed_features(recipe: Recipe) -> Iterator[str]:
    """The recipe suits each feature that it lists."""
    for position, feature in enumerate(recipe.train.features):
        if recipe.privacy is not None:
            key = f"train.features.{position} = {feature.name}"
            yield f"{key}: computes from samples without noise; must be left out with privacy"
        if feature.applies_network and recipe.train.optimizer.observes_layers:
            yield (
                f"train.optimizer = {recipe.train.optimizer.name}: must be another optimizer with "
                f"{feature.name}, which applies the network twice"
            )
        yield from feature.check(recipe)


@rule
def check_skipped_samples(recipe: Recipe) -> Iterator[str]:
    """Loss, accumulation and optimizer can skip the samples or labels that the recipe skips."""
    train = recipe.train
    share = train.loss.hardest_share
    ignored = recipe.dataset.ignore_index
    if ignored is not None and not train.loss.masks_labels:
        yield (
            f"dataset.ignore_index = {ignored}: must be null with train.loss.name = "
            f"{train.loss.name}, which accepts no mask of valid labels"
        )
    if share < 1 and train.accumulate_steps > 1:
        yield (
            f"train.loss.hardest_share = {share}: must be 1.0 with train.accumulate_steps = "
            f"{train.accumulate_steps}; the hardest samples are chosen from the whole batch"
        )
    if train.loss.compares_samples and train.accumulate_steps > 1:
        yield (
            f"train.accumulate_steps = {train.accumulate_steps}: must be 1 with train.loss = "
            f"{train.loss.name}, which compares each sample with the others of the whole batch"
        )
    if train.optimizer.observes_layers:
        reason = f"with {train.optimizer.name}, which uses every sample"
        if share < 1:
            yield f"train.loss.hardest_share = {share}: must be 1.0 {reason}"
        elif ignored is not None:
            yield f"dataset.ignore_index = {ignored}: must be null {reason}"


@rule
def check_freezing(recipe: Recipe) -> Iterator[str]:
    """Only frozen parameters can be unfrozen, and not with an optimizer that reads layers."""
    train = recipe.train
    if train.unfreeze and not train.freeze:
        yield "train.unfreeze: needs train.freeze, which names the parameters to freeze at first"
    if train.unfreeze and train.optimizer.observes_layers:
        yield f"train.unfreeze: must be [] with {train.optimizer.name}, which looks into layers"
    if train.unfreeze and train.optimizer.averages_iterates:
        yield (
            f"train.unfreeze: must be [] with {train.optimizer.name}, whose average would "
            "consist of the frozen weights for long"
        )
    if train.freeze_statistics == "frozen" and not train.freeze:
        yield "train.freeze_statistics = frozen: needs train.freeze; `all` is for every batch norm"


@rule
def check_optimizers(recipe: Recipe) -> Iterator[str]:
    """Separate optimizers update parameters that are trained from the first step on."""
    train = recipe.train
    if not train.optimizers:
        return
    if train.unfreeze:
        yield "train.optimizers: must be [] with train.unfreeze, which begins optimizers later"
    for spec in (train.optimizer, *(entry.optimizer for entry in train.optimizers)):
        if spec.observes_layers:
            yield f"train.optimizers: must be [] with {spec.name}, which looks into layers"
        if spec.averages_iterates:
            yield f"train.optimizers: must be [] with {spec.name}, which averages all parameters"


@rule
def check_rollback(recipe: Recipe) -> Iterator[str]:
    """A rollback needs checkpoints at steps that are known in advance."""
    checkpoint = recipe.checkpoint
    if recipe.train.on_nan.name != "rollback" or "train" not in recipe.stages:
        return
    if "checkpoint" not in recipe.stages:
        stages = show(list(recipe.stages))
        yield f"train.on_nan = rollback: needs the stage checkpoint, and stages = {stages}"
    elif checkpoint.every_steps is None and checkpoint.every_epochs is None:
        yield (
            "train.on_nan = rollback: needs checkpoints to go back to; give checkpoint.every_steps "
            "or checkpoint.every_epochs"
        )


@rule
def check_stages(recipe: Recipe) -> Iterator[str]:
    """Stages run in a fixed order, and most need an earlier stage. A profile needs steps."""
    stages = recipe.stages
    setting = f"stages = {show(list(stages))}"
    if recipe.profile.mode == "only" and "train" not in stages:
        yield f"{setting}: must have train, whose steps are traced"
    in_order = tuple(stage for stage in STAGES if stage in stages)
    if tuple(stages) != in_order:
        yield f"{setting}: must be in this order, each once: {', '.join(in_order)}"
    earlier_stages = {
        "build": "data",
        "compile": "build",
        "train": "compile",
        "eval": "compile",
        "checkpoint": "train",
    }
    for stage, earlier_stage in earlier_stages.items():
        if stage in stages and earlier_stage not in stages:
            yield f"{setting}: {stage} needs {earlier_stage}"


@rule
def check_gradients(recipe: Recipe) -> Iterator[str]:
    """An optimizer that reads layers needs plain gradients."""
    train = recipe.train
    if train.gradients.name != "plain" and train.optimizer.observes_layers:
        yield (
            f"train.gradients = {train.gradients.name}: must be plain with {train.optimizer.name}, "
            "which looks at layers in one backward pass"
        )


@rule
def check_origin(recipe: Recipe) -> Iterator[str]:
    """A run can't both continue another run and start from a checkpoint's weights.

    Evaluation without training needs weights. A resumed run needs the stages train and checkpoint.
    """
    resume = recipe.train.resume
    restore = recipe.checkpoint.restore
    if restore is None and "eval" in recipe.stages and "train" not in recipe.stages:
        yield "checkpoint.restore: missing; stages have eval without train, so name a checkpoint"
    if resume is not None and not {"train", "checkpoint"} <= set(recipe.stages):
        yield (
            f"train.resume = {resume}: needs the stages train and checkpoint; to look at a "
            "finished run name it as checkpoint.restore"
        )
    if resume is not None and restore is not None:
        yield (
            f"train.resume = {resume}: conflicts with checkpoint.restore = {restore}; resume "
            "continues a run, restore starts a new one"
        )


@rule
def check_train_sample_sizes(recipe: Recipe) -> Iterator[str]:
    """`eval.on_train` needs samples of one size, since it runs the evaluation's program."""
    if recipe.eval.on_train and recipe.dataset.buckets:
        yield "eval.on_train = true: needs samples of one size; must be false with dataset.buckets"


@rule
def check_metric_names(recipe: Recipe) -> Iterator[str]:
    """Metrics that select checkpoints or change the run exist, and are measured in training."""
    is_measured = recipe.eval.every_steps or recipe.eval.every_epochs
    names = [*METRICS, *(metric.name for metric in recipe.eval.metrics)]
    for name in dict.fromkeys(names):
        if names.count(name) > 1 or name in NON_METRICS:
            yield f"eval.metrics: {name} exists already; must have another name"
    # Metrics of all kinds of targets are accepted, since the kind is unknown until data are read.
    names += target_metrics.NUMBER_METRICS
    names += target_metrics.LABEL_METRICS
    names += target_metrics.TOKEN_METRICS
    names += target_metrics.MATCH_METRICS
    for key, metric in list_deciding_metrics(recipe).items():
        if metric is not None and metric not in names:
            problem = explain_unknown_name("metric", metric, names)
            yield f"{key} = {metric}: {problem}; eval.metrics adds others"
        elif metric is not None and not is_measured:
            yield f"{key} = {metric}: needs eval.every_steps or eval.every_epochs"
        elif metric is not None and recipe.eval.every_seconds is not None:
            yield f"{key} = {metric}: must be null with eval.every_seconds, whose steps vary"


@rule
def check_ops(recipe: Recipe) -> Iterator[str]:
    """Map ops fit the dataset's images and produce equal shapes in both splits."""
    facts = find_known_facts(recipe)
    if facts is None:
        return
    mapped: dict[str, dict[str, ColumnSpec]] = {}
    for key, split in (("train", recipe.dataset.train), ("eval", recipe.dataset.eval)):
        try:
            ops = fit_to_classes(split.ops, facts.classes)
            mapped[key] = compute_column_specs(ops, facts.specs())
        except ValueError as error:
            yield f"dataset.{key}.{error}"
    if any(op.choices > 1 for op in recipe.dataset.train.ops):
        # Batches of several sizes are compared with the evaluation when the data is read.
        return
    train, evaluated = mapped.get("train", {}), mapped.get("eval", {})
    for name in sorted(train.keys() & evaluated.keys() - {"label"}):
        if train[name].shape != evaluated[name].shape:
            yield describe_unequal_shapes(name, train[name], evaluated[name])


@rule
def check_batch_size(recipe: Recipe) -> Iterator[str]:
    """An epoch has at least one batch."""
    facts = find_known_facts(recipe)
    split = recipe.dataset.train
    if facts is None or not split.drop_remainder:
        return
    batch_size = recipe.train.batch_size
    shards = split.num_shards
    num_samples = count_shard_samples(facts.train_size, shards or 1)
    if batch_size > num_samples:
        samples = f"training samples of each of {shards} shards" if shards else "training samples"
        yield (
            f"train.batch_size = {batch_size}: must be at most the {num_samples} {samples}; give a "
            "smaller batch, or dataset.train.drop_remainder=false"
        )


@rule
def check_warmup_unit(recipe: Recipe) -> Iterator[str]:
    """Warmup is set in steps or in epochs, not both."""
    for key, schedule in recipe.train.schedules.items():
        try:
            schedule.warmup(1)  # raises for two units, whatever the steps of an epoch
        except ValueError as error:
            yield f"{key}: {error}"


@rule
def check_warmup_length(recipe: Recipe) -> Iterator[str]:
    """Warmup ends before training does."""
    if _has_problem(recipe, check_one_length, check_warmup_unit, check_batch_size):
        return
    steps_per_epoch = _count_known_steps(recipe)
    if steps_per_epoch is None:
        return
    if not list(find_length_problems(recipe.train, steps_per_epoch)):
        yield from find_warmup_problems(recipe.train, steps_per_epoch)


@rule
def check_imported_network(recipe: Recipe) -> Iterator[str]:
    """The function that an imported model names is in a plug-in."""
    try:
        recipe.model.require_code()
    except ValueError as error:
        yield f"model.{error}"


def make_batching(recipe: Recipe, samples: int) -> Batching:
    """Return the batching of a training split with `samples` samples."""
    split = recipe.dataset.train
    size = recipe.train.batch_size
    return Batching(samples, size, split.drop_remainder, split.repeat, split.num_shards or 1)
