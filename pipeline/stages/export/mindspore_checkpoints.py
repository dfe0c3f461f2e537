"""A run's checkpoints as MindSpore's `.ckpt` files, written during a run or by a command.

MindSpore's ModelCheckpoint names files `{prefix}-{epoch}_{step}.ckpt`. `epoch` is the number of the
sink, or of the epoch in a run without sinks: the sink epoch. `step` counts in it. Both begin at 1.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path

import numpy as np

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    list_saved_steps,
    make_checkpoint_path,
    parse_checkpoint_step,
)
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import Checkpoint, read_checkpoint, read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.data import load_data
from pipeline.stages.record.run_directory import (
    CHECKPOINT_FILES,
    CHECKPOINT_NAMES,
    require_run_dir,
)
from pipeline.stages.record.trained_run import read_run_recipe

SUFFIX = ".ckpt"
OPT_STATE = "opt_state/"
MOMENTS = {"trace": "moments", "mu": "moment1", "nu": "moment2"}
"""MindSpore's names for optax's moments: one of Momentum and SGD, and two of Adam."""
GLOBAL_STEP = "global_step"
STEP = re.compile(r"[0-9]{1,18}")


def make_file_name(prefix: str, steps_per_sink_epoch: int, step: int) -> str:
    """Return the name of the checkpoint of a step, `{prefix}-{epoch}_{step}.ckpt`."""
    sink_epoch, step_index = divmod(step - 1, steps_per_sink_epoch)
    return f"{prefix}-{sink_epoch + 1}_{step_index + 1}{SUFFIX}"


def _compile_file_pattern(prefix: str) -> re.Pattern[str]:
    return re.compile(rf"{re.escape(prefix)}-\d+_\d+\.ckpt")


def iterate_free_prefixes(folder: Path, prefix: str) -> Iterator[str]:
    """Yield the prefix, `{prefix}_1`, `{prefix}_2` and so on that have no files."""
    names = [file.name for file in folder.iterdir()]
    for number in count():
        candidate = f"{prefix}_{number}" if number else prefix
        if not any(map(_compile_file_pattern(candidate).fullmatch, names)):
            yield candidate


def collect_arrays(saved: Checkpoint, *, optimizer: bool) -> Mapping[str, np.ndarray]:
    """Return the parameters of a checkpoint by path.

    With `optimizer`, the step and the optimizer's state are added. Names of the state are such as
    `moments.conv_0/kernel` and `optimizer.count`.
    """
    arrays = {path.removeprefix("params/"): array for path, array in saved.select_weights().items()}
    if not optimizer:
        return arrays
    for path, array in saved.arrays.items():
        if path.startswith(OPT_STATE):
            keys = path.removeprefix(OPT_STATE).split("/")
            index = next((index for index, key in enumerate(keys) if key in MOMENTS), None)
            if index is None:
                arrays[f"optimizer.{'/'.join(keys)}"] = array
            else:
                arrays[f"{MOMENTS[keys[index]]}.{'/'.join(keys[index + 1 :])}"] = array
    return {**arrays, GLOBAL_STEP: np.array([saved.step], np.int32)}


def write_checkpoints(
    source: Path, folder: Path, prefix: str | None, *, optimizer: bool
) -> list[Path]:
    """Write each checkpoint of a run as a file, and return the files.

    `source` is a run directory or one checkpoint. Arrays have the names of `collect_arrays`.
    Raises DataError without a checkpoint, RunError if the folder can't be written.
    """
    run_dir = require_run_dir(source)
    recipe = read_run_recipe(run_dir)
    with convert_write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        prefix = next(iterate_free_prefixes(folder, prefix or recipe.model.name))
    files = []
    checkpoints = _read_checkpoints(source, run_dir)
    steps_per_sink_epoch = _count_sink_epoch_steps(recipe, checkpoints[0])
    for saved in checkpoints:
        file = folder / make_file_name(prefix, steps_per_sink_epoch, saved.step)
        write_weights(file, collect_arrays(saved, optimizer=optimizer))
        files.append(file)
    return files


def _read_checkpoints(source: Path, run_dir: Path) -> list[Checkpoint]:
    """Read the checkpoint at `source`, or all of a run. Raises DataError if none exists."""
    if parse_checkpoint_step(source) is not None and source.parent.name == FOLDER:
        return [read_saved(source)]
    root = run_dir / FOLDER
    steps = list_saved_steps(root)
    if not steps:
        raise DataError(f"{run_dir}: holds no checkpoint")
    return [read_checkpoint(make_checkpoint_path(root, step)) for step in steps]


def _count_sink_epoch_steps(recipe: Recipe, saved: Checkpoint) -> int:
    """Return the number of steps in a sink epoch. If this is an epoch, the dataset is read."""
    size = recipe.train.sink_size if recipe.train.sink else None
    if saved.host.sink is not None:
        size = saved.host.sink.size  # chosen by the run
    if isinstance(size, int) and size > 0:
        return size
    return load_data(recipe).train_order.steps_per_epoch


class MindSporeCopies:
    """The files `{prefix}-{epoch}_{step}.ckpt` of one run, in the format of MindSpore.

    They are in `shared_folder`, or in `ckpt` of the run directory if it is None. `ckpt.json` in the
    run directory lists them by step, so that a resumed run uses the same names, and never removes a
    file of another run. If another run has files with the prefix, `_1`, `_2` and so on is appended.
    In a shared folder, a file `.PREFIX.claim` reserves the prefix for the run. With `optimizer`,
    files also have the optimizer's state and the step. Raises RunError if the folder can't be made,
    or if the list can't be read.
    """

    def __init__(
        self,
        run_dir: Path,
        shared_folder: Path | None,
        prefix: str,
        steps_per_sink_epoch: int,
        *,
        optimizer: bool = False,
    ) -> None:
        self._folder = (shared_folder or run_dir / CHECKPOINT_FILES).absolute()
        self._has_optimizer = optimizer
        # None if it isn't shared: the folder in the run directory, which may be moved.
        self._listed_folder = str(self._folder) if shared_folder is not None else None
        self._list_path = run_dir / CHECKPOINT_NAMES
        self._steps_per_sink_epoch = steps_per_sink_epoch
        self._names, earlier_prefix = self._read_list(prefix)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prefix = earlier_prefix or self._claim_prefix(prefix)
            self._write_list()
        except OSError as error:
            problem = f"checkpoint.directory = {self._folder}: can't be written: {error.strerror}"
            raise RunError(problem) from error

    def add(self, checkpoint: Path) -> None:
        """Write the file of a complete checkpoint, and list it."""
        step = parse_checkpoint_step(checkpoint)
        assert step is not None, "a checkpoint is named by its step"
        name = make_file_name(self._prefix, self._steps_per_sink_epoch, step)
        # If the process is killed while writing, the listed file can be removed later.
        self._names[step] = name
        self._write_list()
        saved = read_checkpoint(checkpoint)
        arrays = collect_arrays(saved, optimizer=self._has_optimizer)
        write_weights(self._folder / name, arrays)

    def write_graph(self, graph: bytes) -> None:
        """Write a network's graph as `{prefix}-graph.meta`. Raises RunError."""
        file = self._folder / f"{self._prefix}-graph.meta"
        with convert_write_errors(file):
            write_whole(file, graph)

    def remove(self, step: int) -> None:
        """Remove the file of a step, if this run has written one."""
        name = self._names.pop(step, None)
        if name is not None:
            (self._folder / name).unlink(missing_ok=True)
            self._write_list()

    def synchronize(self, checkpoints: Mapping[int, Path]) -> None:
        """Write missing files, and remove this run's files without a checkpoint."""
        for step in [step for step in self._names if step not in checkpoints]:
            self.remove(step)
        for step, checkpoint in checkpoints.items():
            name = self._names.get(step)
            if name is None or not (self._folder / name).is_file():
                # A damaged checkpoint gets no file. It is reported when a run restores it.
                with suppress(DamagedError):
                    self.add(checkpoint)

    def _claim_prefix(self, prefix: str) -> str:
        """Return a free prefix. In a shared folder, reserve it for this run."""
        free_prefixes = iterate_free_prefixes(self._folder, prefix)
        while True:
            free = next(free_prefixes)
            if self._listed_folder is None:
                return free
            with suppress(FileExistsError):
                (self._folder / f".{free}.claim").touch(exist_ok=False)
                return free

    def _write_list(self) -> None:
        by_step = {str(step): name for step, name in sorted(self._names.items())}
        files = {"folder": self._listed_folder, "prefix": self._prefix, "files": by_step}
        write_whole(self._list_path, json.dumps(files, indent=1) + "\n")

    def _read_list(self, prefix: str) -> tuple[dict[int, str], str | None]:
        """Return the names of this run's files by step, and its prefix.

        Without a list of this folder and prefix, returns {} and None. The list may come from a
        stranger, so only names that a run could write are returned.
        """
        try:
            document = read_json(self._list_path)
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError) as error:
            raise RunError(f"{self._list_path}: can't be read: {error}") from error
        files = document.get("files") if isinstance(document, dict) else None
        if not isinstance(files, dict):
            raise RunError(f"{self._list_path}: must list files by step")
        listed_prefix = document.get("prefix")
        if (
            not isinstance(listed_prefix, str)
            or not re.fullmatch(rf"{re.escape(prefix)}(_\d+)?", listed_prefix)
            or document.get("folder") != self._listed_folder
        ):
            return {}, None
        pattern = _compile_file_pattern(listed_prefix)
        names = {
            int(step): name
            for step, name in files.items()
            if STEP.fullmatch(step) and isinstance(name, str) and pattern.fullmatch(name)
        }
        return names, listed_prefix
