"""A run's checkpoints as MindSpore's `.ckpt` files, under its names, with the optimizer's state.

Files are `{prefix}-{epoch}_{step}.ckpt` as of MindSpore's ModelCheckpoint (K-03): the epoch is a
sink where the run has sinks, else a pass, and the step is counted within it. Where a folder has
files of a prefix already, `_1`, `_2` and so on is added to it.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from rich.console import Console

from pipeline.checkpoint.checkpoint_folder import FOLDER, saved_steps, step_of
from pipeline.checkpoint.restore import Checkpoint, read_checkpoint, read_saved, tell_user
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import RunSchedule
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.data import load_data
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.record.run_directory import RECIPE, run_of

SUFFIX = ".ckpt"
STATE = "opt_state/"
MOMENTS = {"trace": "moments", "mu": "moment1", "nu": "moment2"}
"""MindSpore's names of the optimizers' arrays: Momentum and SGD, Adam's first and second."""
GLOBAL_STEP = "global_step"


def write_checkpoints(
    source: Path, folder: Path, prefix: str | None = None, *, optimizer: bool = False
) -> list[Path]:
    """Write each checkpoint of a run, or the one that `source` is, and return the files.

    Arrays have the names of the run's parameters; with `optimizer` those of its state follow, as
    `moments.conv_0/kernel`, and `global_step`. Raises DataError where there is no checkpoint,
    RunError where the folder can't be written.
    """
    run_dir = run_of(source)
    if run_dir is None:
        raise DataError(f"{source}: is no run directory; it holds no {RECIPE}")
    recipe = read_run_recipe(run_dir)
    schedule = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = free_prefix(folder, prefix or recipe.model.name)
    except OSError as error:
        raise RunError(f"{folder}: can't be written: {error.strerror}") from error
    written = []
    for saved in _checkpoints(source, run_dir):
        schedule = schedule or _schedule(recipe, saved)
        file = folder / file_name(free, schedule, saved.step)
        write_weights(file, weight_arrays(saved, optimizer=optimizer))
        written.append(file)
    return written


def file_name(prefix: str, schedule: RunSchedule, step: int) -> str:
    """The name of the checkpoint of a step, `{prefix}-{epoch}_{step}.ckpt`."""
    place = schedule.place(step)
    return f"{prefix}-{place.sink}_{place.sink_step}{SUFFIX}"


def free_prefix(folder: Path, prefix: str) -> str:
    """The prefix, or with the first of `_1`, `_2`, ... of which the folder has no file."""
    names = [file.name for file in folder.iterdir()]
    tried, number = prefix, 0
    while any(re.fullmatch(rf"{re.escape(tried)}-\d+_\d+\.ckpt", name) for name in names):
        number += 1
        tried = f"{prefix}_{number}"
    return tried


def _checkpoints(source: Path, run_dir: Path) -> list[Checkpoint]:
    if step_of(source) is not None and source.parent.name == FOLDER:
        return [read_saved(source)]
    root = run_dir / FOLDER
    steps = saved_steps(root)
    if not steps:
        raise DataError(f"{run_dir}: holds no checkpoint")
    return [read_checkpoint(root / str(step), tell_user) for step in steps]


def _schedule(recipe: Recipe, saved: Checkpoint) -> RunSchedule:
    """The sinks and passes of the run; the data is read where sinks are passes."""
    train, kept = recipe.train, saved.host.sink
    size = kept.size if kept is not None else train.sink_size if train.sink else None
    if isinstance(size, int) and size > 0:
        return RunSchedule(saved.step, size, size)
    dataset = load_data(recipe, Reporter(console=Console(file=io.StringIO())))
    return RunSchedule(saved.step, dataset.train_order.steps_per_pass, None)


def weight_arrays(saved: Checkpoint, *, optimizer: bool) -> Mapping[str, np.ndarray]:
    """The parameters of a checkpoint by path; with `optimizer` the state of the optimizer too."""
    arrays = {path.removeprefix("params/"): array for path, array in saved.weights().items()}
    if not optimizer:
        return arrays
    state = {
        _state_name(path): array for path, array in saved.arrays.items() if path.startswith(STATE)
    }
    return {**arrays, **state, GLOBAL_STEP: np.array([saved.step], np.int32)}


def _state_name(path: str) -> str:
    """The name of an array of the optimizer's state: `moments.conv_0/kernel` for its momentum."""
    parts = path.removeprefix(STATE).split("/")
    kinds = [place for place, part in enumerate(parts) if part in MOMENTS]
    if not kinds:
        return f"optimizer.{'/'.join(parts)}"
    kind = kinds[0]
    return f"{MOMENTS[parts[kind]]}.{'/'.join(parts[kind + 1 :])}"
