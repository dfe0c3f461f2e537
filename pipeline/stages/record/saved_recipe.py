"""Recipe of a checkpoint, and how it differs from the recipe that uses the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.checkpoint.host_state import HostState
from pipeline.checkpoint.restore import (
    Checkpoint,
    Warn,
    arrange_arrays,
    join_problems,
    read_saved,
    read_to_resume,
)
from pipeline.config.defaults import normalise_recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.tree_diff import Difference
from pipeline.stages.record.recorded_recipe import find_changes, hash_recipe
from pipeline.training.state import TrainState


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
        arranged = arrange_arrays(saved.folder, saved.select_weights(), like.variables)
        return like.replace_variables(arranged), saved
    except DataError as error:
        changes = join_problems(list_changes(saved, recipe))
        raise DataError(f"{error}; {changes}" if changes else str(error)) from error


def _find_differences(saved: Checkpoint, recipe: Mapping[str, Any]) -> list[Difference]:
    # Recipes are nearly always equal, and comparing hashes is faster than finding differences.
    if hash_recipe(saved.recipe) == hash_recipe(recipe):
        return []
    return find_changes(recipe, normalise_recipe(saved.recipe))
