"""A trained run that is read from its directory: recipe, weights and sample format.

The recipe of a checkpoint may differ from the recipe that uses the checkpoint.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar, cast, get_args

from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.restore import (
    Checkpoint,
    Warn,
    arrange_arrays,
    join_problems,
    read_saved,
    read_to_resume,
)
from pipeline.config.compose import compose_and_check
from pipeline.config.defaults import normalise_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.tree_diff import Difference
from pipeline.core.host.cuda import find_plugin
from pipeline.core.plugins.loading import list_loaded_plugins, take_flags, to_flags
from pipeline.core.registry import list_components
from pipeline.data.audio import AudioFormat, parse_audio_format
from pipeline.data.columns import ColumnSpec, Distribution, Targets, Task
from pipeline.data.series.series_columns import ScaleSeries
from pipeline.data.series.series_format import SeriesFormat, describe_series
from pipeline.data.table import FittedTable
from pipeline.data.text.text_format import TextFormat, read_text_format
from pipeline.data.transform import replace_targets
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.stages.record.brightness import Brightness, parse_brightness
from pipeline.stages.record.continuity import explain_other_version
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.recorded_recipe import find_changes, hash_recipe
from pipeline.stages.record.run_directory import RECIPE, SUMMARY, find_run_dir, require_run_dir
from pipeline.training.parallel.devices import hide_gpus
from pipeline.training.state import TrainState

T = TypeVar("T")
DTYPES = frozenset(("bool", "uint8", "int32", "float32"))
"""Dtypes of columns."""


@dataclass(frozen=True)
class Samples:
    """The format of a network's samples before map ops, and its classes."""

    columns: Mapping[str, ColumnSpec]
    """Shape and dtype of each column on which the network's inputs depend, such as an image
    (height, width, channels) or a row of a table (columns,)."""
    targets: Targets
    table: FittedTable | None = None
    """The columns of a table; None for other samples."""
    text: TextFormat | None = None
    """The tokenizer of texts; None for other samples."""
    scale: ScaleSeries | None = None
    """How series are standardised; None for other samples."""
    brightness: Brightness | None = None
    """Brightness of the training images; None if it wasn't measured."""
    audio: AudioFormat | None = None
    """Rate and length of sound; None for other samples."""
    series: SeriesFormat | None = None
    """The files of series; None for other samples."""

    @property
    def single(self) -> ColumnSpec:
        """The only column. Raises DataError if the network reads several."""
        if len(self.columns) > 1:
            raise DataError(
                f"the network reads the columns {', '.join(self.columns)}; samples must have all "
                "of them, as the arrays of an .npz file"
            )
        return next(iter(self.columns.values()))

    def pack(self, make: Callable[[ColumnSpec], T]) -> T | dict[str, T]:
        """Return what `make` returns for the only column, or for several by name."""
        if len(self.columns) == 1:
            return make(self.single)
        return {name: make(spec) for name, spec in self.columns.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return the columns as a tree for JSON."""
        return {
            name: {"shape": list(spec.shape), "dtype": spec.dtype}
            for name, spec in self.columns.items()
        }

    @property
    def image(self) -> ColumnSpec | None:
        """The format of images; None if samples are something else."""
        specs = list(self.columns.values())
        return specs[0] if len(specs) == 1 and len(specs[0].shape) == 3 else None

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes in label order, or of the predicted numbers or labels."""
        return self.targets.names


@dataclass(frozen=True)
class TrainedRun:
    """A run with a checkpoint: its recipe, weights and sample format.

    An ensemble has the recipe of its first member without folds, and the largest step of all.
    """

    recipe: Recipe
    arrays: Arrays
    """Weights by name. Names in an ensemble begin with the member's number, as in
    `0/params/conv_0/kernel`."""
    step: int
    samples: Samples
    members: tuple[TrainedRun, ...] = ()
    """The runs of an ensemble, whose predictions are averaged; empty for a single run."""
    temperature: float = 1.0
    """Divisor of the logits of classes; 1 without `calibrate`, and for an ensemble."""
    ledger: Arrays = field(default_factory=dict)
    """The arrays of the ledger of training samples by name; {} without `train.ledger`."""

    def __str__(self) -> str:
        if not self.members:
            return f"{self.recipe.model.name} of step {self.step}"
        names = dict.fromkeys(member.recipe.model.name for member in self.members)
        return f"ensemble of {len(self.members)} runs of {', '.join(names)}"


def read_run_recipe(run_dir: Path, overrides: Sequence[str] = ()) -> Recipe:
    """Read the recipe of a run, with overrides. Raises RecipeError if it isn't valid any more, or
    without the plug-ins that the run was trained with."""
    try:
        return compose_and_check([f"+recipe={run_dir / RECIPE}", *overrides], length_replaced=True)
    except RecipeError as error:
        if problem := explain_other_version(run_dir):
            raise RecipeError([problem, *error.problems]) from error
        flags = _list_missing_plugins(run_dir)
        if not flags:
            raise
        raise RecipeError(
            f"{run_dir}: was trained with custom components, and runs load no code: add "
            f"{shlex.join(flags)}"
        ) from error


def _list_missing_plugins(run_dir: Path) -> list[str]:
    """Return the flags for the plug-ins of a run that aren't loaded, by its recorded command; none
    if that isn't a command line."""
    loaded = {plugin.name for plugin in list_loaded_plugins()}
    processes = read_provenance(run_dir)
    process = processes[-1] if processes else {}
    if not set(process.get("plugins") or ()) - loaded:
        return []
    try:
        sources, _ = take_flags(shlex.split(str(process.get("command", ""))))
    except (ValueError, RecipeError):
        return []
    # A file's path is relative to the folder of the command; a module has no path.
    paths = [Path(str(process.get("folder", "")), source) for source in sources]
    pairs = zip(sources, paths, strict=True)
    return to_flags([str(path) if path.is_file() else source for source, path in pairs])


def spare_gpus(folder: Path) -> None:
    """Hide GPUs from JAX in the whole process, unless the run in a folder used a GPU.

    JAX would reserve most of a GPU's memory, which another run may need.
    """
    run_dir = find_run_dir(folder)
    if find_plugin() is None or run_dir is None or read_run_recipe(run_dir).device.uses_cuda:
        return
    hide_gpus()


def read_trained_run(folder: Path) -> TrainedRun:
    """Read a run from its directory, its folder of checkpoints or one checkpoint.

    Raises DataError if `folder` has no run or checkpoint, or the checkpoint is of another recipe;
    RecipeError if the recipe isn't valid.
    """
    run_dir = require_run_dir(folder)
    recipe = read_run_recipe(run_dir)
    saved = read_saved(folder)
    if changes := list_changes(saved, recipe.model_dump(mode="json")):
        raise DataError(
            f"{saved.folder}: of another recipe than {run_dir / RECIPE}: {join_problems(changes)}"
        )
    samples = _read_samples(run_dir / SUMMARY, recipe)
    samples = replace(samples, series=describe_series(recipe.dataset))
    run = TrainedRun(
        recipe,
        saved.select_weights(),
        saved.step,
        samples,
        temperature=read_temperature(run_dir / SUMMARY),
        ledger=saved.select_part("features/ledger"),
    )
    for feature in recipe.train.features:
        if feature.completes is not None:
            module, _, name = feature.completes.partition(":")
            run = getattr(import_module(module), name)(run)
    return run


def select_complete_weights(folder: Path, saved: Checkpoint) -> Arrays:
    """Return the weights of a checkpoint that was read from `folder`; if it has adapters alone,
    their sum with the frozen weights. Raises as `read_trained_run` does."""
    names = {path.split("/")[0] for path in saved.select_part("features")}
    features: Mapping[str, Any] = list_components("feature") if names else {}
    if any(features[name].completes is not None for name in names & features.keys()):
        return read_trained_run(folder).arrays
    return saved.select_weights()


def read_temperature(summary: Path) -> float:
    """Return the temperature in a summary; 1 without one."""
    try:
        temperature = float(read_json(summary)["calibration"]["temperature"])
    except (OSError, ValueError, TypeError, KeyError):
        return 1.0
    return temperature if 0 < temperature < float("inf") else 1.0


def parse_samples(data: Any, folder: Path) -> Samples:
    """Return the sample format that a JSON object describes; `folder` has the tokenizer of texts.

    Raises ValueError for other JSON, DataError if the tokenizer is missing or damaged.
    """
    match _name_columns(data):
        case {"columns": dict(inputs), "classes": [*classes], **rest} if inputs and all(
            isinstance(name, str) for name in classes
        ):
            entries = cast(Mapping[str, Any], rest)
            columns = {str(name): _parse_column(spec) for name, spec in inputs.items()}
            targets = _parse_targets(tuple(classes), entries.get("targets"))
            encoding = entries.get("table")
            table = None if encoding is None else FittedTable.model_validate(encoding)
            text = read_text_format(folder, entries)
            document = entries.get("scale")
            scale = None if document is None else ScaleSeries.model_validate(document)
            row = columns.get("features")
            if table is None or (row is not None and row.shape == (table.width,)):
                brightness = parse_brightness(entries.get("brightness"))
                audio = parse_audio_format(entries)
                series = _parse_series(entries.get("series"))
                return Samples(columns, targets, table, text, scale, brightness, audio, series)
    raise ValueError("columns and classes are missing")


def _name_columns(data: Any) -> Any:
    """Return the JSON object with `columns`. Older runs have `image` instead. Raises DataError if
    theirs are texts or a table, which a network now reads by other names and shapes."""
    match data:
        case {"image": dict(image), **rest} if "columns" not in rest:
            unnamed = [key for key in ("text", "table") if rest.get(key) is not None]
            if unnamed:
                raise DataError(
                    f"the run has samples without columns beside its {unnamed[0]}: it is of an "
                    "older version; train it again"
                )
            return {**rest, "columns": {"image": image}}
    return data


def _parse_column(document: Any) -> ColumnSpec:
    """Return the spec of a column in a JSON object. Raises ValueError for other JSON."""
    match document:
        case {"shape": [*shape], "dtype": str(dtype)} if (
            all(type(size) is int and size > 0 for size in shape) and dtype in DTYPES
        ):
            return ColumnSpec(tuple(shape), dtype)
    raise ValueError("columns must have shapes and dtypes")


def _parse_series(document: Any) -> SeriesFormat | None:
    """Return the format of series in a JSON object; None without one."""
    return None if document is None else SeriesFormat.model_validate(document)


def _parse_targets(names: tuple[str, ...], document: Any) -> Targets:
    """Return the targets in a JSON object. Raises ValueError for other JSON."""
    match document:
        case {"task": str(task), "mean": [*mean], "std": [*std]} if (
            task in get_args(Task)
            and len(mean) == len(std) == (len(names) if task == "regression" else 0)
            and all(type(number) in (int, float) for number in (*mean, *std))
        ):
            distribution = document.get("distribution", "")
            if distribution in get_args(Distribution):
                targets = Targets(names, cast(Task, task), tuple(mean), tuple(std))
                return targets.with_distribution(distribution)
    raise ValueError("targets must be those of a run")


def _read_samples(summary: Path, recipe: Recipe) -> Samples:
    """Return the sample format of a summary, or else of the dataset. Raises DataError."""
    try:
        return parse_samples(read_json(summary)["data"], summary.parent)
    except (OSError, ValueError, TypeError, KeyError) as error:
        facts = recipe.dataset.facts()
        if facts is None:
            raise DataError(
                f"{summary}: lacks the columns and classes of the run; finish the run with "
                f"train.resume={summary.parent}"
            ) from error
        targets = Targets(tuple(map(str, range(facts.classes))))
        targets = replace_targets(recipe.dataset.eval.ops, targets)
        return Samples({"image": facts.specs()["image"]}, targets)


def list_changes(saved: Checkpoint, recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that decides a run's numbers and differs in `recipe`."""
    return list(map(str, _find_differences(saved, recipe)))


def list_changes_of_meaning(saved: Checkpoint, recipe: Mapping[str, Any]) -> list[str]:
    """Return a line for each key that decides the network's function and differs in `recipe`.

    These are the keys of the layers, and if the dataset is the same, of the map ops of
    evaluation. Other datasets need other map ops.
    """
    changes = _find_differences(saved, recipe)
    sections: list[tuple[str, ...]] = [("model",)]
    if not any(change.path == ("dataset", "name") for change in changes):
        sections += [("dataset", "eval", "host_ops"), ("dataset", "eval", "ops")]
    return [
        str(change)
        for change in changes
        if any(change.path[: len(section)] == section for section in sections)
        and change.path[:2] != ("model", "init")
    ]


def restore_state(
    run_dir: Path, like: TrainState, recipe: Mapping[str, Any], warn: Warn
) -> tuple[TrainState, HostState] | None:
    """Read state and host state from the newest undamaged checkpoint of a run; None without one.

    Warns of newer damaged checkpoints. Raises DataError if no checkpoint can be read or if it has
    another network, RecipeError if its recipe trains to other losses than `recipe`.
    """
    saved = read_to_resume(run_dir, warn)
    if saved is None:
        return None
    if saved.has_former_layout:
        raise DataError(
            f"{saved.folder}: was saved by an earlier version with other names of states, so the "
            f"run can't be resumed; start a new run with checkpoint.restore={run_dir}"
        )
    if changes := list_changes(saved, recipe):
        raise RecipeError([f"{change} in {saved.folder}" for change in changes])
    return arrange_arrays(saved.folder, saved.arrays, like), saved.host


def restore_weights(
    folder: Path, like: TrainState, recipe: Mapping[str, Any], warn: Warn
) -> tuple[TrainState, Checkpoint]:
    """Return `like` with the weights and batch statistics of a checkpoint, and the checkpoint.

    `folder` is as in `read_saved`. Raises DataError if the checkpoint is missing or has another
    network; the message lists the keys of `recipe` that differ.
    """
    saved = read_saved(folder, warn)
    try:
        weights = select_complete_weights(folder, saved)
        arranged = arrange_arrays(saved.folder, weights, like.variables)
        return like.replace_variables(arranged), saved
    except DataError as error:
        changes = join_problems(list_changes(saved, recipe))
        raise DataError(f"{error}; {changes}" if changes else str(error)) from error


def _find_differences(saved: Checkpoint, recipe: Mapping[str, Any]) -> list[Difference]:
    # Recipes are nearly always equal, and comparing hashes is faster than finding differences.
    if hash_recipe(saved.recipe) == hash_recipe(recipe):
        return []
    return find_changes(recipe, normalise_recipe(saved.recipe))
