"""Restore: find, verify and read the checkpoints of a run.

Each is verified file by file before anything in it is parsed. Where the newest of a run is damaged,
the user is warned and the one before is read.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    HOST,
    JSON,
    MANIFEST,
    RECIPE,
    STATE,
    saved_steps,
    set_aside,
    step_of,
    strangers,
)
from pipeline.checkpoint.host_state import HostState, parse_host_state
from pipeline.checkpoint.manifest import (
    DamagedError,
    read_json,
    recipe_digest,
    unreadable,
    verify,
)
from pipeline.checkpoint.orbax_arrays import read_arrays
from pipeline.config.defaults import normalised
from pipeline.core.errors import DataError, RecipeError, printable_lines
from pipeline.core.files.error_text import show
from pipeline.core.files.tree_diff import Difference, differences
from pipeline.stages.record.run_directory import decides
from pipeline.training.state import TrainState

WEIGHTS = ("params", "batch_stats")
MAX_LISTED = 5
T = TypeVar("T")
Warn = Callable[[str], None]


def tell_user(text: str) -> None:
    """Warn on stderr, for commands without a run log."""
    print(printable_lines(f"warning: {text}"), file=sys.stderr)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as it was read; `recipe` is None for versions that kept none."""

    where: Path
    arrays: Mapping[str, np.ndarray]
    host: HostState
    recipe: Mapping[str, Any] | None

    @property
    def step(self) -> int:
        """The number of steps done when it was saved."""
        return int(self.arrays["step"])

    def weights(self) -> dict[str, np.ndarray]:
        """Return parameters and batch statistics by path; the average of parameters where there is
        one, as evaluations use it."""
        averages = {
            path.replace("average", "params", 1): path
            for path in self.arrays
            if path.startswith("average/")
        }
        return {
            path: self.arrays[averages.get(path, path)]
            for path in self.arrays
            if path.partition("/")[0] in WEIGHTS
        }

    def changes(self, recipe: Mapping[str, Any]) -> list[str]:
        """Return the keys that decide a run's numbers and differ in `recipe`, a line for each."""
        return list(map(_line, self._differences(recipe)))

    def changes_of_meaning(self, recipe: Mapping[str, Any]) -> list[str]:
        """Return the keys that decide what the weights compute and differ in `recipe`.

        These are the layers, and the map ops of evaluation if the dataset is the same: another
        dataset has other map ops. How weights are trained on is up to `recipe`.
        """
        found = self._differences(recipe)
        sections: list[tuple[str, ...]] = [("model",)]
        if not any(changed.where == ("dataset", "name") for changed in found):
            sections.append(("dataset", "eval", "ops"))
        return [
            _line(changed)
            for changed in found
            if any(changed.where[: len(section)] == section for section in sections)
            and changed.where[:2] != ("model", "init")
        ]

    def _differences(self, recipe: Mapping[str, Any]) -> list[Difference]:
        if self.recipe is None or recipe_digest(self.recipe) == recipe_digest(recipe):
            return []
        found = differences(recipe, normalised(self.recipe))
        return [changed for changed in found if decides(changed.where)]


def _line(changed: Difference) -> str:
    return f"{changed.key} = {show(changed.one)}: was {show(changed.other)}"


def restore_state(
    run_dir: Path, like: TrainState, recipe: Mapping[str, Any], warn: Warn
) -> tuple[TrainState, HostState] | None:
    """Read the newest sound checkpoint of a run, state and host state; None when there is none.

    Warns of newer ones that are damaged. Raises DataError when no checkpoint can be read or it is
    of another network, RecipeError when it is of a recipe that would have had other losses.
    """
    root = run_dir / FOLDER
    if not saved_steps(root):
        return None
    saved = _read_to_resume(root, warn)
    if changes := saved.changes(recipe):
        raise RecipeError([f"{change} in {saved.where}" for change in changes])
    return fill(saved.where, saved.arrays, like), saved.host


def set_others_aside(run_dir: Path, step: int, warn: Warn) -> None:
    """Rename what is no sound checkpoint up to `step`, so that the run can save later steps.

    Warns of each: those after `step` are damaged, others are named as a checkpoint and are none.
    """
    root = run_dir / FOLDER
    for path in [root / str(saved) for saved in saved_steps(root) if saved > step]:
        warn(f"{path}: set aside as {set_aside(path, 'damaged').name}")
    for path in strangers(root):
        warn(f"{path}: is no checkpoint; set aside as {set_aside(path, 'foreign').name}")


def _read_to_resume(root: Path, warn: Warn) -> Checkpoint:
    try:
        return _read_newest(root, warn)
    except DamagedError as error:
        raise DamagedError(f"{error}; to start over, move that folder elsewhere") from error


def restore_weights(
    folder: Path, like: TrainState, recipe: Mapping[str, Any], warn: Warn
) -> tuple[TrainState, Checkpoint]:
    """Return `like` with the weights and batch statistics of a checkpoint, and the checkpoint.

    `folder` is as in `read_saved`. Raises DataError when there is none, or of another network; the
    keys of `recipe` that differ are in its message.
    """
    saved = read_saved(folder, warn)
    wanted = {"params": like.params, "batch_stats": like.batch_stats}
    try:
        return replace(like, **fill(saved.where, saved.weights(), wanted)), saved
    except DataError as error:
        changes = listed(saved.changes(recipe))
        raise DataError(f"{error}; {changes}" if changes else str(error)) from error


def read_saved(folder: Path, warn: Warn = tell_user) -> Checkpoint:
    """Read a checkpoint: `folder` is a run directory, its `checkpoints` or one checkpoint in there.

    Of several the newest that can be read is used, with a warning for each damaged one. Raises
    DataError when there is none, and RunError as `unreadable` does.
    """
    try:
        if step_of(folder) is not None and step_of(folder) in saved_steps(folder.parent):
            return read_checkpoint(folder, warn)
        for root in (folder / FOLDER, folder):
            if saved_steps(root):
                return _read_newest(root, warn)
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from error
    raise DataError(
        f"{folder}: holds no checkpoint; name a run directory, its {FOLDER} folder or one "
        "checkpoint in there"
    )


def read_checkpoint(folder: Path, warn: Warn = tell_user) -> Checkpoint:
    """Verify and read one checkpoint. Raises DamagedError where a byte is not as written, and
    RunError as `unreadable` does."""
    if (folder / MANIFEST).exists() or (folder / RECIPE).exists():
        verify(folder)
        recipe = read_json(folder / RECIPE / JSON)
    else:
        warn(f"{folder}: of a version without checksums; taken as it is")
        recipe = None
    if not isinstance(recipe, dict | None):
        raise DamagedError(f"{folder / RECIPE / JSON}: must be a JSON object")
    host = _read_host(folder / HOST / JSON)
    saved = Checkpoint(folder, read_arrays(folder / STATE), host, recipe)
    _require_step(saved)
    return saved


def _read_host(file: Path) -> HostState:
    try:
        return parse_host_state(read_json(file))
    except ValueError as error:
        raise DamagedError(f"{file}: is not what a run saves: {error}") from error


def _require_step(saved: Checkpoint) -> None:
    step = saved.arrays.get("step")
    if step is None or step.shape != () or not np.issubdtype(step.dtype, np.integer):
        raise DamagedError(f"{saved.where / STATE}: says of no step that it was made there")
    if saved.step != step_of(saved.where):
        raise DamagedError(f"{saved.where / STATE}: was made at step {saved.step}")


def by_path(tree: Any) -> dict[str, Any]:
    """Return the leaves of a tree by path, such as "params/conv_0/kernel"."""
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def fill(where: Path, arrays: Mapping[str, np.ndarray], like: T) -> T:
    """Arrange arrays in the structure of `like`; every name, shape and dtype must agree.

    Raises DataError.
    """
    wanted = by_path(like)
    problems = [f"{path} is missing" for path in wanted if path not in arrays]
    problems += [f"{path} is not in this network" for path in arrays if path not in wanted]
    problems += [
        f"{path} is {_form(arrays[path])}, this network needs {_form(leaf)}"
        for path, leaf in wanted.items()
        if path in arrays and _form(arrays[path]) != _form(leaf)
    ]
    if problems:
        raise DataError(f"{where}: of another recipe: {listed(problems)}")
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[path] for path in wanted])


def _form(array: Any) -> str:
    return f"{array.dtype}{list(array.shape)}"


def listed(problems: Sequence[str]) -> str:
    """Join the first few problems on one line, with the number of the others."""
    more = f" and {len(problems) - MAX_LISTED} more" if len(problems) > MAX_LISTED else ""
    return f"{'; '.join(problems[:MAX_LISTED])}{more}"


def _read_newest(root: Path, warn: Warn) -> Checkpoint:
    damaged = []
    for step in reversed(saved_steps(root)):
        try:
            saved = read_checkpoint(root / str(step), warn)
        except DamagedError as error:
            damaged.append(error)
            continue
        for fault in damaged:
            warn(f"{fault}; taking the checkpoint of step {saved.step}")
        return saved
    raise DamagedError(
        f"{root}: none of its checkpoints can be read: {listed(list(map(str, damaged)))}"
    )
