"""Recipe in a run directory: written, read, and compared with a recipe that resumes the run."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import LENGTH_UNITS
from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import sync_ancestors, write_whole
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.tree_diff import Difference, TreePath, iterate_leaves, list_differences
from pipeline.stages.record.run_directory import RECIPE

LENGTH = tuple(("train", key) for key in (*LENGTH_UNITS, "end_step"))
FREE_TO_CHANGE = (
    *LENGTH,
    *(("train", key) for key in ("planned_for", "sink", "sink_size", "mechanism")),
    *(("train", key) for key in ("dispatch_seconds", "feed", "memory", "resume", "resume_changed")),
    *(("dataset", key) for key in ("root", "mirrors")),
    *((key,) for key in ("stages", "autotune", "autotune_search", "debug", "checkpoint", "eval")),
    *((key,) for key in ("monitor", "dump", "receipt", "cache", "profile")),
    *(("parallel", key) for key in ("devices", "mesh")),
    ("launch",),
)
"""Keys that a resumed run may change if `train.resume` names its directory. Only those in `LENGTH`
change losses, since the learning-rate schedule is as long as the run."""
MODE = ("parallel", "mode")
EQUAL_MODES = ("data", "fsdp")
"""Values of `parallel.mode` with which training computes the same losses and weights."""


def forbids_change(path: TreePath, free: Sequence[tuple[str, ...]] = FREE_TO_CHANGE) -> bool:
    """Return whether a resumed run can't change a key: no prefix of its path is in `free`."""
    return not any(path[: len(prefix)] == prefix for prefix in free)


def hash_recipe(recipe: Mapping[str, Any]) -> str:
    """Return a SHA-256 of the keys of a resolved recipe that a resumed run can't change."""
    leaves = {}
    for path, leaf in iterate_leaves(recipe):
        if forbids_change(path):
            has_equal_mode = path == MODE and leaf in EQUAL_MODES
            leaves[json.dumps(path)] = EQUAL_MODES[0] if has_equal_mode else leaf
    return hashlib.sha256(json.dumps(leaves, sort_keys=True).encode()).hexdigest()


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into its run directory, and sync it to the disk."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_whole(run_dir / RECIPE, text)
    sync_ancestors(run_dir)


def read_recorded_recipe(run_dir: Path) -> Mapping[str, Any]:
    """Read the recipe of a run, with defaults for keys that are newer than the run.

    Raises DataError if it can't be read.
    """
    # Imported here, since few runs are resumed.
    from pipeline.config.defaults import normalise_recipe

    path = run_dir / RECIPE
    try:
        tree = read_yaml(path)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{path}: must hold keys and values, not {type(tree).__name__}")
    return normalise_recipe(tree)


def find_changes(
    recipe: Mapping[str, Any],
    recorded: Mapping[str, Any],
    free: Sequence[tuple[str, ...]] = FREE_TO_CHANGE,
) -> list[Difference]:
    """Return the differences of two resolved recipes, except in `free` keys and `EQUAL_MODES`."""
    changes = []
    for change in list_differences(recipe, recorded):
        modes = {change.value, change.other_value} if change.path == MODE else None
        if forbids_change(change.path, free) and modes != set(EQUAL_MODES):
            changes.append(change)
    return changes
