"""Restore: find, verify and read the checkpoints of a run.

All files of a checkpoint are verified before any is parsed. If the newest checkpoint of a run is
damaged, the user is warned and the previous one is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    META,
    RECIPE,
    STATE,
    find_strangers,
    list_saved_steps,
    make_checkpoint_path,
    parse_checkpoint_step,
    rename_aside,
)
from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.manifest import DamagedError, make_read_error, read_json, verify_files
from pipeline.checkpoint.parse_host_state import parse_host_state
from pipeline.core.errors import DataError, printable_lines
from pipeline.core.files.value_text import join_first
from pipeline.core.host.tree_paths import flatten_by_path

MAX_LISTED = 5
"""Most problems that a message lists."""
T = TypeVar("T")
Warn = Callable[[str], None]


def warn_on_stderr(text: str) -> None:
    """Warn on stderr, for commands without a run log."""
    print(printable_lines(f"warning: {text}"), file=sys.stderr)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was read from disk."""

    folder: Path
    arrays: Mapping[str, np.ndarray]
    host: HostState
    recipe: Mapping[str, Any]

    @property
    def step(self) -> int:
        """The number of steps done when it was saved."""
        return int(self.arrays["step"])

    @property
    def has_former_layout(self) -> bool:
        """Whether the arrays have the names of versions without `train.features`."""
        return "loss_scale" in self.arrays

    def select_weights(self) -> dict[str, np.ndarray]:
        """Return the weights that an evaluation uses, by path: parameters, such as
        `params/conv_0/kernel`, and collections, such as `batch_stats/batch_norm_0/mean`.

        If parameters are averaged, their averages are returned.
        """
        weights = {f"params/{name}": array for name, array in self.select_part("params").items()}
        former = self.has_former_layout
        averages = self.select_part("average" if former else "features/average")
        for feature in {path.split("/")[0] for path in self.select_part("features")} - {"average"}:
            averages |= self.select_part(f"features/{feature}/evaluated")
        weights |= {f"params/{name}": array for name, array in averages.items()}
        if former:
            statistics = self.select_part("batch_stats")
            return weights | {f"batch_stats/{name}": array for name, array in statistics.items()}
        return weights | self.select_part("collections")

    def select_part(self, part: str) -> dict[str, np.ndarray]:
        """Return the arrays of a part of the state by their path in it; {} if it is empty."""
        prefix = f"{part}/"
        return {
            path.removeprefix(prefix): array
            for path, array in self.arrays.items()
            if path.startswith(prefix)
        }


def read_to_resume(run_dir: Path, warn: Warn) -> Checkpoint | None:
    """Read the newest sound checkpoint of a run; None if it has no checkpoint.

    Warns of newer checkpoints, which are damaged. Raises DamagedError if all are damaged, and
    RunError as in `make_read_error`.
    """
    root = run_dir / FOLDER
    if not list_saved_steps(root):
        return None
    try:
        return _read_newest(root, warn)
    except DamagedError as error:
        raise DamagedError(f"{error}; to start over, move that folder elsewhere") from error


def set_others_aside(run_dir: Path, step: int, warn: Warn) -> None:
    """Rename damaged checkpoints after `step`, and strangers (see `checkpoint_folder`).

    The run will write checkpoints with these names. Warns of each renamed entry.
    """
    root = run_dir / FOLDER
    for saved_step in list_saved_steps(root):
        if saved_step > step:
            path = make_checkpoint_path(root, saved_step)
            new_name = rename_aside(path, "damaged").name
            warn(f"{path}: set aside as {new_name}")
    for path in find_strangers(root):
        new_name = rename_aside(path, "foreign").name
        warn(f"{path}: isn't a checkpoint; set aside as {new_name}")


def read_saved(folder: Path, warn: Warn = warn_on_stderr) -> Checkpoint:
    """Read a checkpoint, or the newest sound checkpoint of a run.

    `folder` is a checkpoint, a run directory or its folder `checkpoints`. Warns of newer
    checkpoints, which are damaged. Raises DataError without a sound checkpoint, and RunError as in
    `make_read_error`.
    """
    try:
        if parse_checkpoint_step(folder) in list_saved_steps(folder.parent):
            return read_checkpoint(folder)
        for root in (folder / FOLDER, folder):
            if list_saved_steps(root):
                return _read_newest(root, warn)
    except OSError as error:
        raise make_read_error(Path(error.filename or folder), error) from error
    raise DataError(
        f"{folder}: holds no checkpoint; name a run directory, its {FOLDER} folder or one "
        "checkpoint in there"
    )


def read_checkpoint(folder: Path) -> Checkpoint:
    """Verify and read one checkpoint. Raises DamagedError if a byte has changed, and RunError as in
    `make_read_error`."""
    from pipeline.checkpoint.orbax_arrays import read_arrays

    verify_files(folder)
    recipe = read_json(folder / RECIPE / META)
    if not isinstance(recipe, dict):
        raise DamagedError(f"{folder / RECIPE / META}: must be a JSON object")
    file = folder / HOST / META
    try:
        host = parse_host_state(read_json(file))
    except ValueError as error:
        raise DamagedError(f"{file}: must be the state of a run: {error}") from error
    saved = Checkpoint(folder, read_arrays(folder / STATE), host, recipe)
    step = saved.arrays.get("step")
    if step is None or step.shape != () or not np.issubdtype(step.dtype, np.integer):
        raise DamagedError(f"{folder / STATE}: has no step")
    if saved.step != parse_checkpoint_step(folder):
        raise DamagedError(f"{folder / STATE}: was made at step {saved.step}")
    return saved


def arrange_arrays(source: Path, arrays: Mapping[str, np.ndarray], like: T) -> T:
    """Arrange arrays, which are by path, in the tree structure of `like`. Raises DataError if a
    path, shape or dtype differs. The message begins with `source`."""
    expected = flatten_by_path(like)
    problems = [f"{path} is missing" for path in expected if path not in arrays]
    problems += [f"{path} is not in this network" for path in arrays if path not in expected]
    problems += [
        f"{path} is {_format_type(arrays[path])}, this network needs {_format_type(leaf)}"
        for path, leaf in expected.items()
        if path in arrays and _format_type(arrays[path]) != _format_type(leaf)
    ]
    if problems:
        raise DataError(f"{source}: of another recipe: {join_problems(problems)}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in expected])


def _format_type(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def join_problems(problems: Sequence[str]) -> str:
    """Join the first `MAX_LISTED` problems on one line, with the number of further problems."""
    return join_first(problems, MAX_LISTED, "; ")


def _read_newest(root: Path, warn: Warn) -> Checkpoint:
    """Read a folder's newest sound checkpoint, and warn of newer ones. Raises DamagedError if all
    are damaged."""
    faults = []
    for step in reversed(list_saved_steps(root)):
        try:
            saved = read_checkpoint(make_checkpoint_path(root, step))
        except DamagedError as error:
            faults.append(str(error))
            continue
        for fault in faults:
            warn(f"{fault}; using the checkpoint of step {saved.step}")
        return saved
    raise DamagedError(f"{root}: none of its checkpoints can be read: {join_problems(faults)}")
