"""A run's checkpoints as MindSpore's `.ckpt` files, under its names, with the optimizer's state.

Where a folder has files of a prefix already, `_1`, `_2` and so on is added to it.
"""

from __future__ import annotations

import io
from pathlib import Path

from rich.console import Console

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    checkpoint_path,
    checkpoint_step,
    saved_steps,
)
from pipeline.checkpoint.restore import Checkpoint, read_checkpoint, read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.core.reporter import Reporter
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.data import load_data
from pipeline.stages.export.mindspore_names import file_name, free_prefix, weight_arrays
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.record.run_directory import RECIPE, run_of


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
    steps_per_epoch = None
    try:
        folder.mkdir(parents=True, exist_ok=True)
        free = free_prefix(folder, prefix or recipe.model.name)
    except OSError as error:
        raise RunError(f"{folder}: can't be written: {error.strerror}") from error
    written = []
    for saved in _checkpoints(source, run_dir):
        steps_per_epoch = steps_per_epoch or _steps_per_epoch(recipe, saved)
        file = folder / file_name(free, steps_per_epoch, saved.step)
        write_weights(file, weight_arrays(saved, optimizer=optimizer))
        written.append(file)
    return written


def _checkpoints(source: Path, run_dir: Path) -> list[Checkpoint]:
    if checkpoint_step(source) is not None and source.parent.name == FOLDER:
        return [read_saved(source)]
    root = run_dir / FOLDER
    steps = saved_steps(root)
    if not steps:
        raise DataError(f"{run_dir}: holds no checkpoint")
    return [read_checkpoint(checkpoint_path(root, step)) for step in steps]


def _steps_per_epoch(recipe: Recipe, saved: Checkpoint) -> int:
    """The length of a sink of the run; if sinks are passes, the data is read for its length."""
    train, sink = recipe.train, saved.host.sink
    size = sink.size if sink is not None else train.sink_size if train.sink else None
    if isinstance(size, int) and size > 0:
        return size
    dataset = load_data(recipe, Reporter(console=Console(file=io.StringIO())))
    return dataset.train_order.steps_per_pass
