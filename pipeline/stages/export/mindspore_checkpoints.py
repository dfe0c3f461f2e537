"""A run's checkpoints as MindSpore's `.ckpt` files, under its names, with the optimizer's state.

Where a folder has files of a prefix already, `_1`, `_2` and so on is added to it.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    checkpoint_path,
    checkpoint_step,
    saved_steps,
)
from pipeline.checkpoint.manifest import DamagedError
from pipeline.checkpoint.restore import Checkpoint, read_checkpoint, read_saved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.reporter import Reporter
from pipeline.models.weights.files.weight_files import write_weights
from pipeline.stages.data import load_data
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.record.run_directory import RECIPE, run_of

SUFFIX = ".ckpt"
STATE = "opt_state/"
MOMENTS = {"trace": "moments", "mu": "moment1", "nu": "moment2"}
"""MindSpore's names of the optimizers' arrays: Momentum and SGD, Adam's first and second."""
GLOBAL_STEP = "global_step"


def file_name(prefix: str, steps_per_epoch: int, step: int) -> str:
    """The name of the checkpoint of a step, `{prefix}-{epoch}_{step}.ckpt`."""
    epoch, epoch_step = divmod(step - 1, steps_per_epoch)
    return f"{prefix}-{epoch + 1}_{epoch_step + 1}{SUFFIX}"


def free_prefix(folder: Path, prefix: str) -> str:
    """The prefix, or with the first of `_1`, `_2`, ... of which the folder has no file."""
    names = [file.name for file in folder.iterdir()]
    tried, number = prefix, 0
    while any(re.fullmatch(rf"{re.escape(tried)}-\d+_\d+\.ckpt", name) for name in names):
        number += 1
        tried = f"{prefix}_{number}"
    return tried


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


STEP = re.compile(r"[0-9]{1,18}")


@dataclass(frozen=True)
class CopiesPlace:
    """Where the files of a run are written."""

    folder: Path
    names: Path
    """The file in the run directory that lists them by step."""
    shared: bool
    """Whether other runs may write to the folder; else it moves with the run."""


class MindSporeCopies:
    """The files of one run: `{prefix}-{epoch}_{step}.ckpt` in `place.folder`.

    If the folder has files of that prefix from another run, `_1`, `_2` and so on is added to it.
    Raises RunError if the folder can't be made, or the list of the files can't be read.
    """

    def __init__(self, place: CopiesPlace, prefix: str, steps_per_epoch: int) -> None:
        self._folder = place.folder.absolute()
        self._shared = place.shared
        self._list = place.names
        self._steps_per_epoch = steps_per_epoch
        self._names, known = self._listed(prefix)
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._prefix = known or self._claimed(prefix)
            self._write_list()
        except OSError as error:
            problem = f"checkpoint.directory = {self._folder}: can't be written: {error.strerror}"
            raise RunError(problem) from error

    def add(self, checkpoint: Path) -> None:
        """Write the file of a complete checkpoint, and list it."""
        step = checkpoint_step(checkpoint)
        assert step is not None, "a checkpoint is named by its step"
        name = file_name(self._prefix, self._steps_per_epoch, step)
        # Listed before it is written: a file that is killed in between is this run's to remove.
        self._names[step] = name
        self._write_list()
        saved = read_checkpoint(checkpoint)
        write_weights(self._folder / name, weight_arrays(saved, optimizer=False))

    def remove(self, step: int) -> None:
        """Remove the file of a step, where this run has written one."""
        name = self._names.pop(step, None)
        if name is not None:
            (self._folder / name).unlink(missing_ok=True)
            self._write_list()

    def agree(self, checkpoints: Mapping[int, Path]) -> None:
        """Write the files that checkpoints lack, and remove this run's others."""
        for step in [step for step in self._names if step not in checkpoints]:
            self.remove(step)
        for step, checkpoint in checkpoints.items():
            if not (self._folder / self._names.get(step, ".")).is_file():
                # A damaged checkpoint has none, and is named by whoever reads it.
                with suppress(DamagedError):
                    self.add(checkpoint)

    def _claimed(self, prefix: str) -> str:
        """Return a prefix that no other run has, and keep others from it."""
        number = 0
        while True:
            free = free_prefix(self._folder, prefix if number == 0 else f"{prefix}_{number}")
            if not self._shared:
                return free
            try:
                (self._folder / f".{free}.claim").touch(exist_ok=False)
            except FileExistsError:
                number += 1
            else:
                return free

    @property
    def _folder_listed(self) -> str | None:
        """The folder as the list names it; None for the run's own, which moves with it."""
        return str(self._folder) if self._shared else None

    def _write_list(self) -> None:
        by_step = {str(step): name for step, name in sorted(self._names.items())}
        files = {"folder": self._folder_listed, "prefix": self._prefix, "files": by_step}
        write_whole(self._list, json.dumps(files, indent=1) + "\n")

    def _listed(self, prefix: str) -> tuple[dict[int, str], str | None]:
        """Return the names of this run's files in the folder by step, and its prefix; nothing and
        None before there are any.

        The list may be a stranger's: only names that a run would give are believed.
        """
        try:
            kept = read_json(self._list)
        except FileNotFoundError:
            return {}, None
        except (OSError, ValueError) as error:
            raise RunError(f"{self._list}: can't be read: {error}") from error
        files = kept.get("files") if isinstance(kept, dict) else None
        if not isinstance(files, dict):
            raise RunError(f"{self._list}: must list files by step")
        known = kept.get("prefix")
        own = isinstance(known, str) and re.fullmatch(rf"{re.escape(prefix)}(_\d+)?", known)
        if not own or kept.get("folder") != self._folder_listed:
            return {}, None
        given = re.compile(rf"{re.escape(known)}-\d+_\d+\.ckpt")
        names = {
            int(step): name
            for step, name in files.items()
            if STEP.fullmatch(step) and isinstance(name, str) and given.fullmatch(name)
        }
        return names, known
