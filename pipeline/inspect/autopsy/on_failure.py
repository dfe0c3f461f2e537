"""Autopsy of a run that a non-finite step ended: replay, finding, files, and a reproducer.

    reproducer/  recipe.yaml  lowerings.json  arrays.npz  step.json

`arrays.npz` has the part of the state that gradients depend on, and the batch before the map ops.
Nothing in the folder is ever executed.
"""

from __future__ import annotations

import shlex
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax.errors import FlaxError
from flax.traverse_util import unflatten_dict
from pydantic import TypeAdapter

from pipeline.backends.base import Executable
from pipeline.backends.graph.replay import find_largest_magnitude
from pipeline.checkpoint.checkpoint_folder import AUTOPSY, REPRODUCER
from pipeline.checkpoint.restore import arrange_arrays
from pipeline.config.cache import cache_root
from pipeline.config.recipe import CacheSpec, Recipe
from pipeline.core.errors import DataError, PipelineError, RunError
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.host.signals import Interrupted
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.core.plugins.loading import list_loaded_plugins, to_flags
from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec, Split, Targets
from pipeline.data.dataset_spec import MapOp
from pipeline.data.inputs import NetworkInput, NetworkInputs
from pipeline.data.padding.buckets import Padding, sort_buckets
from pipeline.data.row_views import find_place
from pipeline.data.series.series_columns import ScaleSeries
from pipeline.data.tables.encode_table import EncodeTable
from pipeline.engine.history import Examination
from pipeline.inspect.autopsy.examine import Autopsy, NonFiniteSamples, compute_outcome, examine
from pipeline.models.lowerings.tune.tuner import Tuning, choose_lowerings
from pipeline.models.weights.files.weight_files import read_weights, write_weights
from pipeline.stages.build import make_step_config
from pipeline.stages.lower import (
    LOWERINGS,
    lay_out,
    list_problems,
    read_choice,
    require_layout,
    with_policy,
)
from pipeline.stages.record.run_directory import RECIPE
from pipeline.stages.record.trained_run import read_run_recipe
from pipeline.stages.runner.context import CompiledRun
from pipeline.stages.sample_sizes import fit_ops
from pipeline.training.features.accumulation import count_microbatches
from pipeline.training.features.freezing import Freezing, select_phase
from pipeline.training.parallel.microbatches import compute_microbatch_size
from pipeline.training.parallel.state_sharing import gather_arrays
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from pipeline.training.update import init_state, init_with_output

MAX_PLACES = 8
"""Most samples whose files are named."""
EXAMINATION_TIMEOUT_S = 3_600.0
"""Seconds that other processes wait while the first one examines a step."""
ARRAYS = "arrays.npz"
STEP = "step.json"
FILES = (RECIPE, LOWERINGS, ARRAYS, STEP)
"""Files that `write_inputs` writes."""
_BATCH = {
    "columns": "columns",
    "seed": "seed",
    "pass_": "epoch",
    "sample": "sample",
    "count": "count",
}
"""Fields of a batch by their names in `ARRAYS`."""
_ENCODING_OPS: Mapping[str, type[MapOp]] = {
    "encode_table": EncodeTable,
    "scale_series": ScaleSeries,
}
"""Ops that are fitted on the training split, which no recipe has, by name."""
MAX_CLASSES = 1_000_000
"""Most outputs of a network that a reproducer may name."""


def examine_non_finite_step(run: CompiledRun, state: TrainState, step: int) -> Examination:
    """Examine `step`, which ended a run, and write the finding; `state` is the state before it.

    All processes repeat the step, and the first one examines it. If the autopsy fails or a signal
    interrupts it, this warns, and the run ends because of the non-finite step. Raises PeerGoneError
    if the first process has ended.
    """
    context = run.context
    reporter = context.reporter
    reporter.print_stage("autopsy", f"replaying step {step}, one operation at a time")
    state = gather_arrays(state)
    magnitudes = [find_largest_magnitude(weights) for weights in jax.tree.leaves(state.params)]
    largest_weight = float(np.max(magnitudes, initial=0.0))  # NaN if a weight is NaN
    examined = Examination(largest_weight=largest_weight)
    try:
        # A signal may interrupt this: the state is saved already.
        with context.options.signals.allow_interrupts(), reporter.clock(f"examining step {step}"):
            autopsy = _write_autopsy(run, state, step)
        if autopsy is not None:
            reporter.print_stage("autopsy", str(autopsy))
            finding = autopsy.finding
            # What follows depends on this, also if places can't be read.
            examined = Examination(
                repeats=not autopsy.is_fault_of_machine,
                is_in_data=finding is not None and finding.phase == "data",
                largest_weight=largest_weight,
            )
            samples = None if finding is None else finding.samples
            for line in list_places(run.dataset.train, samples):
                reporter.print_stage("autopsy", line)
            flags = to_flags([plugin.source for plugin in list_loaded_plugins()])
            command = ["python", "-m", "pipeline", *flags, "autopsy", str(context.run_dir)]
            reporter.print_stage("autopsy", f"again: {shlex.join(command)}")
    except Interrupted as signal:
        reporter.warn(f"no autopsy of step {step}: {signal}")
    except Exception as error:  # the non-finite step matters more than any error here
        reporter.warn(f"no autopsy of step {step}: {type(error).__name__}: {error}")
    return Examination(**context.ranks.agree(lambda: asdict(examined), EXAMINATION_TIMEOUT_S))


def _write_autopsy(run: CompiledRun, state: TrainState, step: int) -> Autopsy | None:
    """Repeat a step in all processes; in the first one, examine it and write the reproducer and the
    autopsy. Return the autopsy, or None in the other processes."""
    batch = jax.tree.map(np.array, run.executable.loader.read_batch(step))
    state_before = jax.tree.map(np.array, state)
    step_config = select_phase(run.built.step_config, step - 1)
    autopsy = repeat_step(run.executable, state_before, step)
    if not run.context.ranks.is_first:
        return None
    if autopsy is None:
        autopsy = examine(step_config, state_before, batch, run.backend.device)
    write_reproducer(run.context.run_dir, step_config, state_before, batch, autopsy)
    write_whole(run.context.run_dir / AUTOPSY, format_json(autopsy.to_dict(), indent=2) + "\n")
    return autopsy


def list_places(split: Split, samples: NonFiniteSamples | None) -> Iterator[str]:
    """Yield a line with the files of the samples of a split that aren't finite, unless these are
    the whole batch."""
    if samples is None or not 0 < len(samples.ids) < samples.of:
        return
    places = [find_place(split, sample) for sample in samples.ids[:MAX_PLACES]]
    if all(places):
        num_left = len(samples.ids) - len(places)
        yield f"of {', '.join(places)}" + (f" and {num_left} more" if num_left else "")


def repeat_step(executable: Executable, state: TrainState, step: int) -> Autopsy | None:
    """Run a compiled step again; return an autopsy without a finding if it is finite, else None."""
    outcome = executable.run(executable.put(state), step - 1, step, "none")[1]
    if outcome.non_finite_step is not None:
        return None
    reason = (
        "the same program returned another result on the same state and batch; a fault of memory "
        "or processor is likely, so check this machine and resume the run"
    )
    loss = float(outcome.loss[-1])
    grad_norm = float(outcome.grad_norm[-1])
    return Autopsy(step, loss, grad_norm, None, reason, is_fault_of_machine=True)


@dataclass(frozen=True)
class Reproducer:
    """The inputs of a step to compute again, and what its run found."""

    step_config: StepConfig
    state: TrainState
    batch: Batch
    device: jax.Device
    """Device of the run, or jax's default device if this machine lacks it."""
    facts: Mapping[str, Any]
    """Findings of the run, as JSON."""
    left_out: tuple[str, ...] = ()
    """Features of the run's step that a reproducer doesn't have, such as a teacher."""


def write_reproducer(
    run_dir: Path, step_config: StepConfig, state: TrainState, batch: Batch, autopsy: Autopsy
) -> Path:
    """Write the folder into a run directory and return its path. Raises OSError and RunError."""
    folder = run_dir / REPRODUCER
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    write_inputs(folder, run_dir, step_config, state, batch, {"autopsy": autopsy.to_dict()})
    return folder


def write_inputs(
    folder: Path,
    run_dir: Path,
    step_config: StepConfig,
    state: TrainState,
    batch: Batch,
    facts: Mapping[str, Any],
) -> None:
    """Write the inputs of a step and facts about it into a folder. Raises OSError and RunError."""
    for name in (RECIPE, LOWERINGS):
        if (run_dir / name).exists():
            shutil.copyfile(run_dir / name, folder / name)
    tree = {
        "state": step_config.select_gradient_state(state),
        "batch": {name: getattr(batch, field) for name, field in _BATCH.items()},
    }
    arrays = {path: np.asarray(leaf) for path, leaf in flatten_by_path(tree).items()}
    write_weights(folder / ARRAYS, arrays)
    targets = step_config.targets
    encoding = [op for op in step_config.train_ops if op.name in _ENCODING_OPS]
    document = {
        "inputs": asdict(step_config.inputs),
        "classes": len(targets),
        "targets": targets.to_dict(),
        "frozen": list(step_config.frozen),
        "features": [feature.name for feature in step_config.features],
        "encoding_ops": [op.model_dump(mode="json") for op in encoding],
        "class_counts": list(targets.counts),
        "samples": batch.num_samples,
        "padded_column": step_config.padding.column,
        **facts,
    }
    write_whole(folder / STEP, format_json(document, indent=2) + "\n")


def read_reproducer(folder: Path) -> Reproducer:
    """Read the reproducer in a folder or a run. Raises DataError, RecipeError and RunError."""
    source = next((path for path in (folder / REPRODUCER, folder) if (path / STEP).is_file()), None)
    if source is None:
        raise DataError(
            f"{folder}: has no {REPRODUCER}; a run writes it if a step whose loss or gradient "
            "is not finite ends the run"
        )
    return read_inputs(source, "autopsy", "text")


def read_inputs(source: Path, key: str, required: str) -> Reproducer:
    """Read a folder of `write_inputs`, whose facts are the object `key` with the key `required`.
    Raises DataError, RecipeError and RunError."""
    recipe = read_run_recipe(source)
    tree = _read_arrays(source / ARRAYS)
    with _converting_faults(source / ARRAYS, "doesn't have the arrays of a step"):
        batch = Batch(**{_BATCH[name]: array for name, array in tree["batch"].items()})
        _require_samples(batch)
    with _converting_faults(source / STEP, "does not describe a step"):
        document = read_json(source / STEP)
        facts = dict(document[key])
        facts[required]  # raises KeyError without it
        num_samples = document["samples"]
        features = [str(name) for name in document["features"]]
        batch = replace(batch, num_samples=None if num_samples is None else int(num_samples))
        step_config = _make_step_config(recipe, document, batch)
    with _converting_faults(source / ARRAYS, "doesn't have the arrays that step.json describes"):
        state = _arrange_state(step_config, source / ARRAYS, tree["state"])
    try:
        jax.eval_shape(partial(compute_outcome, step_config), state, batch)
    except (ValueError, TypeError, LookupError, AttributeError, FlaxError) as error:
        reason = str(error).partition("\n")[0]
        raise DataError(
            f"{source}: recipe, arrays and step don't belong to one run: {reason}"
        ) from error
    try:
        device = recipe.device.open(recipe.parallel).device
    except PipelineError:  # the reproducer may have been copied to another machine
        device = jax.devices()[0]
    own = {feature.name for feature in step_config.features}
    left_out = tuple(name for name in features if name not in own)
    step_config = _apply_lowerings(step_config, source, state, batch, device)
    return Reproducer(step_config, state, batch, device, facts, left_out)


@contextmanager
def _converting_faults(file: Path, problem: str) -> Iterator[None]:
    """Raise DataError, with the file and its problem, for an error of reading it in the body."""
    try:
        yield
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise DataError(f"{file}: {problem}: {error}") from error


def _require_samples(batch: Batch) -> None:
    """Raise ValueError unless a batch has at least one sample, and at most one for each row."""
    rows = min(map(len, batch.columns.values()))
    if not 1 <= int(batch.count) <= rows:
        raise ValueError(f"the batch has {int(batch.count)} samples; must have from 1 to {rows}")


def _make_step_config(recipe: Recipe, document: Mapping[str, Any], batch: Batch) -> StepConfig:
    """Make the step's configuration from the recipe and `document`, the content of step.json."""
    inputs = _read_inputs(document["inputs"])
    columns = Split({name: np.asarray(c) for name, c in batch.columns.items()}).specs()
    targets = _read_targets(document)
    encoding = _read_encoding_ops(document)
    spec = recipe.dataset
    # The labels of sequences are classes to the ops.
    classes = len(targets) if targets.task in ("classification", "sequence") else None
    ops, _ = fit_ops(spec.train.ops, encoding, columns, classes, spec.ignore_index)
    # Reproducers of earlier versions have no padded column, and images alone had buckets.
    column = str(document.get("padded_column", "image"))
    padding = Padding(sort_buckets(spec.buckets or ()), spec.padding_mask, column)
    step_config = make_step_config(recipe, targets, inputs, ops, (), padding)
    frozen = tuple(map(str, document["frozen"]))
    others = [feature for feature in step_config.features if not isinstance(feature, Freezing)]
    return replace(step_config, features=(Freezing(frozen), *others))


def _read_targets(document: Mapping[str, Any]) -> Targets:
    """Return the targets that step.json describes. Raises KeyError, TypeError and ValueError."""
    classes = int(document["classes"])
    if not 0 <= classes <= MAX_CLASSES:
        raise ValueError(f"classes = {classes}: must be from 0 to {MAX_CLASSES:,}")
    # Reproducers of earlier versions describe classes alone.
    facts = document.get("targets", {})
    return TypeAdapter(Targets).validate_python(
        {**facts, "names": tuple(map(str, range(classes))), "counts": document["class_counts"]}
    )


def _read_encoding_ops(document: Mapping[str, Any]) -> tuple[MapOp, ...]:
    """Return the ops that step.json has, which precede the recipe's. Raises KeyError, TypeError and
    ValueError."""
    # Reproducers of earlier versions have a table's op alone, or null.
    listed = document["encoding_ops"] if "encoding_ops" in document else [document["table"]]
    return tuple(_ENCODING_OPS[op["name"]].model_validate(op) for op in listed if op is not None)


def _read_inputs(document: Mapping[str, Any]) -> NetworkInputs:
    arrays = []
    for array in document["arrays"]:
        spec = array["spec"]
        shape = tuple(map(int, spec["shape"]))
        if spec["layout"] not in ("hwc", "chw"):
            raise ValueError(f"layout = {spec['layout']!r:.80}: must be hwc or chw")
        column = ColumnSpec(shape, str(spec["dtype"]), spec["layout"])
        arrays.append(NetworkInput(str(array["name"]), str(array["column"]), column))
    return NetworkInputs(tuple(arrays), is_named=bool(document["is_named"]))


def _arrange_state(step_config: StepConfig, path: Path, tree: Mapping[str, Any]) -> TrainState:
    """Return the state with the arrays of a tree. Raises DataError if they are of another step."""

    def init(seed: Any) -> TrainState:
        _, variables = init_with_output(step_config, seed)
        return step_config.select_gradient_state(init_state(step_config, variables))

    like = jax.eval_shape(init, jax.ShapeDtypeStruct((2,), np.uint32))
    parts = {name: part for name, part in tree["features"].items() if name in like.features}
    return arrange_arrays(path, flatten_by_path({**tree, "features": parts}), like)


def _read_arrays(path: Path) -> Mapping[str, Any]:
    arrays = {name: jnp.asarray(array) for name, array in read_weights(path).items()}
    try:
        return unflatten_dict(arrays, sep="/")
    except (ValueError, TypeError) as error:
        raise DataError(f"{path}: must have the arrays of a state and a batch: {error}") from error


def _apply_lowerings(
    step_config: StepConfig, folder: Path, state: TrainState, batch: Batch, device: jax.Device
) -> StepConfig:
    """Return the configuration with the run's lowerings, if the run and this machine have them."""
    file = folder / LOWERINGS
    if not file.exists():
        return step_config
    if step_config.lowerings is None and not hasattr(step_config.network, "policy"):
        return step_config
    choice = read_choice(file)
    require_layout(step_config, choice.layout, file)
    size = compute_microbatch_size(batch.sample.shape[0], count_microbatches(step_config.features))
    laid_out = lay_out(step_config, choice.layout)
    problems = list_problems(laid_out, state, size, size)
    # The cache is the user's, since the recipe may come from a stranger.
    cache = cache_root(CacheSpec(root=None, compiled=False)) / "autotune"
    tuning = Tuning("off", "exhaustive", cache, choice.lowerings)
    try:
        choose_lowerings(problems, device, tuning, lambda _: nullcontext())
    except RunError:
        return step_config
    return with_policy(laid_out, choice.lowerings)
