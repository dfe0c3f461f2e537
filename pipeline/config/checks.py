"""Rules that relate several keys of a recipe. Each yields its problems, dotted key first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from pipeline.config import device_checks
from pipeline.config.adapter_words import loop_problems
from pipeline.config.precision import level_of, precision_of
from pipeline.config.recipe import STAGES, Recipe
from pipeline.config.run_length import total_steps
from pipeline.core.errors import RecipeError
from pipeline.core.files.error_text import no_such
from pipeline.core.files.value_text import show
from pipeline.data.columns import ColumnSpec, Facts
from pipeline.data.order import Batching, shard_samples
from pipeline.data.transform import column_specs
from pipeline.engine.callbacks.metric_callbacks import ReduceOnPlateau, StopAt
from pipeline.models.imported.model_specs import ImportedModelSpec
from pipeline.training import target_metrics
from pipeline.training.metric_names import METRICS
from pipeline.training.parallel.microbatches import batch_multiple
from pipeline.training.parallel.parallel_spec import MAX_DEVICES

RESULTS = ("count", "step")
"""Keys of evals.jsonl that aren't metrics."""
Check = Callable[[Recipe], Iterator[str]]
CHECKS: list[Check] = [*device_checks.RULES]


def conflicts(recipe: Recipe, *, length_replaced: bool) -> list[str]:
    """Return every problem that the rules find, in the order of the rules.

    A run whose length was replaced on the command line may end within its warmup.
    """
    rules = [check for check in CHECKS if not (length_replaced and check is warmup_fits)]
    return [problem for check in rules for problem in check(recipe)]


def fit_to_processes(recipe: Recipe, processes: int) -> Recipe:
    """Return the recipe of a run of several processes: each has a device unless it says otherwise.

    Raises RecipeError if that number of processes can't run it.
    """
    if processes == 1:
        return recipe
    parallel = recipe.parallel
    if parallel.devices is None and parallel.mesh is None:
        if processes > MAX_DEVICES:
            rule = f"must be less than or equal to {MAX_DEVICES}"
            raise RecipeError([f"parallel.devices = {processes}: {rule}"])
        train = recipe.train
        if parallel.batch_per_device is not None:
            batch_size = parallel.batch_per_device * processes
            train = train.model_copy(update={"batch_size": batch_size})
        parallel = parallel.model_copy(update={"devices": processes})
        recipe = recipe.model_copy(update={"parallel": parallel, "train": train})
    problems = conflicts(recipe, length_replaced=True)
    problems = problems or list(device_checks.processes_know_features(recipe, processes))
    if problems:
        raise RecipeError(problems)
    return recipe


def rule(check: Check) -> Check:
    """Register a rule that every recipe is checked against."""
    CHECKS.append(check)
    return check


def known_facts(recipe: Recipe) -> Facts | None:
    """Return sizes known without reading data; None if padding changes shapes and batches."""
    return None if recipe.dataset.buckets else recipe.dataset.facts()


@rule
def one_length(recipe: Recipe) -> Iterator[str]:
    """Exactly one of epochs, passes and steps gives the length of training."""
    train = recipe.train
    lengths = {"epochs": train.epochs, "passes": train.passes, "steps": train.steps}
    typed = [f"{unit} = {value}" for unit, value in lengths.items() if value is not None]
    if len(typed) != 1:
        missing = "none is given; add one, as in train.passes=10, or name a recipe: +recipe=NAME"
        state = f"given are {', '.join(typed)}" if typed else missing
        yield f"train: give exactly one of epochs, passes, steps; {state}"


@rule
def length_in_range(recipe: Recipe) -> Iterator[str]:
    """The number of steps fits into the counters and into memory."""
    if list(one_length(recipe)) or list(batch_fits(recipe)):
        return
    facts = known_facts(recipe)
    per_pass = batching(recipe, facts.train_size).steps_per_pass if facts else 1
    try:
        total_steps(recipe.train, per_pass)
    except ValueError as error:
        yield f"train: {error}"


@rule
def sink_size_in_range(recipe: Recipe) -> Iterator[str]:
    """A sink is one pass (-1) or a positive number of batches; auto is resolved later."""
    size = recipe.train.sink_size
    if size != "auto" and (size == 0 or size < -1):
        yield f"train.sink_size = {size}: must be -1 (a sink per pass), positive or auto"


@rule
def loops_of_adapters_fit(recipe: Recipe) -> Iterator[str]:
    """Loops are of one length, and of one step if the host takes part in each."""
    if any(list(check(recipe)) for check in (one_length, length_in_range, batch_fits)):
        return
    total = recipe.train.steps
    facts = known_facts(recipe)
    if facts is not None:
        total = total_steps(recipe.train, batching(recipe, facts.train_size).steps_per_pass)
    yield from loop_problems(recipe.train, total)


@rule
def device_has_type(recipe: Recipe) -> Iterator[str]:
    """The device computes in the types of all layers."""
    for dtype in precision_of(recipe).dtypes:
        problem = recipe.device.refuses(dtype)
        if problem is not None:
            yield f"train.precision = {recipe.train.precision}: {problem}"


@rule
def number_of_devices_exists(recipe: Recipe) -> Iterator[str]:
    """The recipe's number of devices exists of this kind."""
    parallel = recipe.parallel
    devices = 1 if parallel.mode == "none" else parallel.num_devices
    problem = recipe.device.refuses_devices(devices)
    if problem is not None:
        key = "parallel.devices" if parallel.mesh is None else "parallel.mesh"
        yield f"{key} = {devices}: {problem}"


@rule
def one_source_of_types(recipe: Recipe) -> Iterator[str]:
    """A level and `to_float` both give types to layers; as in MindSpore, not together."""
    level = level_of(recipe)
    if recipe.train.to_float and level != "O0":
        yield (
            f"train.to_float: conflicts with train.precision = {recipe.train.precision}, which is "
            f"{level} on {recipe.device.name} and types every layer; use one of them: "
            "train.precision=O0, or train.to_float=[]"
        )


@rule
def microbatches_are_equal(recipe: Recipe) -> Iterator[str]:
    """Accumulation cuts batches into equal microbatches."""
    train = recipe.train
    if train.batch_size % batch_multiple(train.accumulate_steps):
        yield (
            f"train.accumulate_steps = {train.accumulate_steps}: must divide train.batch_size = "
            f"{train.batch_size}, which is the number of samples of an update"
        )


@rule
def recomputed_blocks_are_compiled(recipe: Recipe) -> Iterator[str]:
    """Activations are computed again in a compiled step, if the optimizer reads no layers."""
    train = recipe.train
    remat = f"train.remat = {train.remat}: must be none with"
    if train.remat != "none" and train.optimizer.observes_layers:
        yield f"{remat} {train.optimizer.name}, which looks into layers"
    if train.remat != "none" and train.mode == "eager":
        yield f"{remat} train.mode = eager, which keeps what each operation gives"
    if train.remat_bytes is not None and train.remat != "auto":
        yield f"train.remat_bytes = {train.remat_bytes}: must be null unless train.remat is auto"


@rule
def compiled_layers_are_of_eager_mode(recipe: Recipe) -> Iterator[str]:
    """Single layers are compiled in an eager step, if the optimizer reads no layers."""
    train = recipe.train
    jit_layers = f"train.jit_layers = {show(list(train.jit_layers))}: must be [] with"
    if train.jit_layers and train.mode != "eager":
        yield f"{jit_layers} train.mode = {train.mode}, which compiles every layer"
    if train.jit_layers and train.optimizer.observes_layers:
        yield f"{jit_layers} {train.optimizer.name}, which looks into layers"


@rule
def losses_are_of_all_samples(recipe: Recipe) -> Iterator[str]:
    """Loss, accumulation and optimizer support skipped samples or labels, if there are any."""
    train = recipe.train
    share = train.loss.hardest_share
    ignored = recipe.dataset.ignore_index
    if ignored is not None and not train.loss.masks_labels:
        yield (
            f"dataset.ignore_index = {ignored}: must be null with train.loss.name = "
            f"{train.loss.name}, which takes no mask of valid labels"
        )
    if share < 1 and train.accumulate_steps > 1:
        yield (
            f"train.loss.hardest_share = {share}: must be 1.0 with train.accumulate_steps = "
            f"{train.accumulate_steps}; a microbatch does not know the hardest of all"
        )
    if train.optimizer.observes_layers and (share < 1 or ignored is not None):
        key = f"train.loss.hardest_share = {share}: must be 1.0"
        if share == 1:
            key = f"dataset.ignore_index = {ignored}: must be null"
        yield f"{key} with {train.optimizer.name}, which takes every sample for one of its own"


@rule
def freezing_fits(recipe: Recipe) -> Iterator[str]:
    """Parameters that join later were frozen; an optimizer that looks into layers sees the same."""
    train = recipe.train
    if train.unfreeze and not train.freeze:
        yield "train.unfreeze: needs train.freeze, which says what is not trained before"
    if train.unfreeze and train.optimizer.observes_layers:
        yield f"train.unfreeze: must be [] with {train.optimizer.name}, which looks into layers"
    if train.freeze_statistics == "frozen" and not train.freeze:
        yield "train.freeze_statistics = frozen: needs train.freeze; all is for every batch norm"


@rule
def rollback_has_somewhere_to_go(recipe: Recipe) -> Iterator[str]:
    """Rollback needs checkpoints at steps that are known in advance."""
    checkpoint = recipe.checkpoint
    if recipe.train.on_nan.name != "rollback" or "train" not in recipe.stages:
        return
    if "checkpoint" not in recipe.stages:
        stages = show(list(recipe.stages))
        yield f"train.on_nan = rollback: needs the stage checkpoint, and stages = {stages}"
    elif checkpoint.every_steps is None and checkpoint.every_passes is None:
        yield (
            "train.on_nan = rollback: needs checkpoints to go back to; give checkpoint.every_steps "
            "or checkpoint.every_passes"
        )


@rule
def profiled_run_trains(recipe: Recipe) -> Iterator[str]:
    """A run that is only profiled has steps to trace."""
    if recipe.profile.mode == "only" and "train" not in recipe.stages:
        yield f"stages = {show(list(recipe.stages))}: must have train, whose steps are traced"


@rule
def stages_in_order(recipe: Recipe) -> Iterator[str]:
    """Stages run in a fixed order, and each needs certain earlier ones."""
    stages = recipe.stages
    in_order = tuple(stage for stage in STAGES if stage in stages)
    if tuple(stages) != in_order:
        order = ", ".join(in_order)
        yield f"stages = {show(list(stages))}: must be in this order, each once: {order}"
    needs = {"build": "data", "compile": "build", "train": "compile", "eval": "compile"}
    for stage, earlier in {**needs, "checkpoint": "train"}.items():
        if stage in stages and earlier not in stages:
            yield f"stages = {show(list(stages))}: {stage} needs {earlier}"


@rule
def gradients_are_of_one_pass(recipe: Recipe) -> Iterator[str]:
    """An optimizer that looks at layers sees one backward pass."""
    train = recipe.train
    if train.gradients.name != "plain" and train.optimizer.observes_layers:
        yield (
            f"train.gradients = {train.gradients.name}: must be plain with {train.optimizer.name}, "
            "which looks at layers in one backward pass"
        )


@rule
def something_to_evaluate(recipe: Recipe) -> Iterator[str]:
    """Evaluating without training needs weights from a checkpoint."""
    evaluates_only = "eval" in recipe.stages and "train" not in recipe.stages
    if evaluates_only and recipe.checkpoint.restore is None:
        yield "checkpoint.restore: missing; stages have eval without train, so name a checkpoint"


@rule
def resuming_trains(recipe: Recipe) -> Iterator[str]:
    """A resumed run trains and saves as before, so it needs both stages."""
    resume = recipe.train.resume
    if resume is not None and not {"train", "checkpoint"} <= set(recipe.stages):
        yield (
            f"train.resume = {resume}: needs the stages train and checkpoint; to look at a "
            "finished run name it as checkpoint.restore"
        )


@rule
def one_origin(recipe: Recipe) -> Iterator[str]:
    """A run continues another or starts from a checkpoint's weights, not both."""
    resume = recipe.train.resume
    restore = recipe.checkpoint.restore
    if resume is not None and restore is not None:
        yield (
            f"train.resume = {resume}: conflicts with checkpoint.restore = {restore}; resume "
            "continues a run, restore starts a new one"
        )


def wanted_metrics(recipe: Recipe) -> dict[str, str | None]:
    """The metrics that decide something, by key."""
    return {
        "checkpoint.best": recipe.checkpoint.best,
        "monitor.early_stop.metric": recipe.monitor.early_stop.metric,
        **{
            f"train.callbacks.{position}.metric": callback.metric
            for position, callback in enumerate(recipe.train.callbacks)
            if isinstance(callback, ReduceOnPlateau | StopAt)
        },
    }


@rule
def train_samples_are_of_one_size(recipe: Recipe) -> Iterator[str]:
    """Training samples that are evaluated have the shapes of the evaluation split."""
    if recipe.eval.on_train and recipe.dataset.buckets:
        yield "eval.on_train = true: needs samples of one size; must be false with dataset.buckets"


@rule
def metrics_exist(recipe: Recipe) -> Iterator[str]:
    """Metrics that decide something exist and are measured during training."""
    measured = recipe.eval.every_steps or recipe.eval.every_passes
    names = [*METRICS, *(metric.name for metric in recipe.eval.metrics)]
    for name in {name for name in names if names.count(name) > 1 or name in RESULTS}:
        yield f"eval.metrics: {name} is there already; must have another name"
    # The kind of targets is known once the data are read.
    names += target_metrics.OF_NUMBERS
    names += target_metrics.OF_LABELS
    names += target_metrics.OF_TOKENS
    for key, metric in wanted_metrics(recipe).items():
        if metric is not None and metric not in names:
            problem = no_such("metric", metric, names)
            yield f"{key} = {metric}: {problem}; eval.metrics adds others"
        elif metric is not None and not measured:
            yield f"{key} = {metric}: needs eval.every_steps or eval.every_passes"


@rule
def ops_fit(recipe: Recipe) -> Iterator[str]:
    """Map ops fit the dataset's images and produce equal shapes in both splits."""
    facts = known_facts(recipe)
    if facts is None:
        return
    images = []
    raw = {"image": ColumnSpec(facts.image, "uint8"), "label": ColumnSpec((), "int32")}
    for key, split in (("train", recipe.dataset.train), ("eval", recipe.dataset.eval)):
        try:
            images.append(column_specs(split.ops, raw)["image"])
        except ValueError as error:
            yield f"dataset.{key}.{error}"
    if len(images) == 2 and images[0].shape != images[1].shape:
        yield (
            f"dataset.eval.ops: leave images of shape {images[1].shape}, "
            f"dataset.train.ops of {images[0].shape}; a network takes one shape"
        )


@rule
def batch_fits(recipe: Recipe) -> Iterator[str]:
    """A pass has at least one batch."""
    facts = known_facts(recipe)
    split = recipe.dataset.train
    if facts is None or not split.drop_remainder:
        return
    size = recipe.train.batch_size
    shards = split.num_shards
    samples = shard_samples(facts.train_size, shards or 1)
    if size > samples:
        whose = f"training samples of each of {shards} shards" if shards else "training samples"
        yield (
            f"train.batch_size = {size}: must not be above the {samples} {whose}; a smaller batch, "
            "or dataset.train.drop_remainder=false"
        )


@rule
def one_warmup(recipe: Recipe) -> Iterator[str]:
    """Warmup is given in steps or in passes."""
    for key, schedule in recipe.train.schedules.items():
        try:
            schedule.warmup(1)
        except ValueError as error:
            yield f"{key}: {error}"


@rule
def warmup_fits(recipe: Recipe) -> Iterator[str]:
    """Warmup ends before training does."""
    facts = known_facts(recipe)
    before = (one_length, one_warmup, batch_fits)
    if facts is None or any(list(check(recipe)) for check in before):
        return
    per_pass = batching(recipe, facts.train_size).steps_per_pass
    try:
        total = total_steps(recipe.train, per_pass)
    except ValueError:  # `length_in_range` reports it
        return
    for key, schedule in recipe.train.schedules.items():
        warmup = schedule.warmup(per_pass)
        if warmup >= total:
            rule = f"must be shorter than the {total} steps of training"
            yield f"{key}: warmup of {warmup} steps {rule}"


@rule
def imported_network_is_loaded(recipe: Recipe) -> Iterator[str]:
    """Code that a model names is in a plug-in of the command line."""
    if not isinstance(recipe.model, ImportedModelSpec):
        return
    try:
        recipe.model.find()
    except ValueError as error:
        yield f"model.{error}"


def batching(recipe: Recipe, samples: int) -> Batching:
    """Return the batching of a training split with `samples` samples."""
    split = recipe.dataset.train
    size = recipe.train.batch_size
    return Batching(samples, size, split.drop_remainder, split.repeat, split.num_shards or 1)
