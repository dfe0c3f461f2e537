"""Recipe in a run directory: written and read, and compared with that of a run to resume."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from pipeline.config.defaults import normalised
from pipeline.config.moved_keys import without_moved
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.atomic_write import sync_ancestors, write_whole
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml, read_yaml
from pipeline.core.files.tree_diff import differences
from pipeline.core.files.value_text import show
from pipeline.stages.record.run_directory import (
    OUTPUTS,
    RECIPE,
    is_free,
    read_status,
    written_at_ns,
)

LENGTH = (("train", "epochs"), ("train", "passes"), ("train", "steps"))
FREE_TO_CHANGE = (
    *LENGTH,
    ("train", "sink"),
    ("train", "sink_size"),
    ("train", "mechanism"),
    ("train", "dispatch_seconds"),
    ("train", "feed"),
    ("train", "resume"),
    ("train", "resume_changed"),
    ("dataset", "root"),
    ("dataset", "mirrors"),
    ("stages",),
    ("autotune",),
    ("autotune_search",),
    ("debug",),
    ("checkpoint",),
    ("eval",),
    ("monitor",),
    ("dump",),
    ("cache",),
    ("profile",),
    ("parallel", "devices"),
    ("parallel", "mesh"),
    ("launch",),
)
"""Keys that a resumed run may change: nothing that decides its losses but its length, with which
the learning-rate schedule stretches, and that only where the run is named."""


def decides(where: Sequence[int | str]) -> bool:
    """Whether a key decides the numbers of a run; its length does not count."""
    return not any(tuple(where[: len(prefix)]) == prefix for prefix in FREE_TO_CHANGE)


def write_recipe(run_dir: Path, recipe: Recipe) -> None:
    """Write the resolved recipe into its run directory, which a power cut doesn't remove then."""
    text = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
    write_whole(run_dir / RECIPE, text)
    sync_ancestors(run_dir)


def to_resume(recipe: Recipe, outputs: Path = OUTPUTS) -> Path | None:
    """Return the run directory of `train.resume`; None where `auto` finds no unfinished run.

    Raises RecipeError when the named directory is no run, or one of a recipe that would have
    had other losses.
    """
    wanted = recipe.train.resume
    if wanted is None:
        return None
    if wanted != "auto":
        before = _recipe_to_resume(Path(wanted), wanted)
        changed = list(_differences(recipe, before, FREE_TO_CHANGE))
        if changed:
            raise RecipeError(changed)
        return Path(wanted)
    runs = sorted(outputs.glob(f"*/*/{RECIPE}"), key=written_at_ns)
    return next((f.parent for f in reversed(runs) if _is_unfinished(f.parent, recipe)), None)


def _is_unfinished(run_dir: Path, recipe: Recipe) -> bool:
    """Whether this is a run of the same recipe and length, not done, with no process at it.

    False for one whose recipe can't be read.
    """
    # First what takes least: nearly all runs are done, and a recipe takes long to parse.
    if read_status(run_dir) == "done":
        return False
    try:
        same = not changed_keys(recipe, run_dir)
    except RecipeError:
        return False
    return same and is_free(run_dir)


def changed_keys(recipe: Recipe, run_dir: Path) -> list[str]:
    """Return a line for each key that differs in a run directory's recipe, length included.

    Raises RecipeError where there is no recipe to be read.
    """
    free = [where for where in FREE_TO_CHANGE if where not in LENGTH]
    try:
        # One that this version has written needs no defaults of newer keys, which take longer.
        written = parse_written_yaml(read_text(run_dir / RECIPE, MAX_BYTES))
    except (OSError, ValueError):
        written = None
    if isinstance(written, dict) and not any(_differences(recipe, written, free)):
        return []
    return list(_differences(recipe, _recipe_to_resume(run_dir, str(run_dir)), free))


def _recipe_to_resume(run_dir: Path, wanted: str) -> Mapping[str, Any]:
    try:
        # A moved key decided no loss: device.devices was of the price alone.
        return normalised(without_moved(read_kept_recipe(run_dir), harmless=False))
    except DataError as error:
        reason = f"no run directory, {RECIPE} can't be read from it"
        raise RecipeError([f"train.resume = {wanted}: {reason}"]) from error


def read_kept_recipe(run_dir: Path) -> Mapping[str, Any]:
    """Read the recipe of a run, with defaults for keys that are newer than the run.

    Raises DataError where it can't be read.
    """
    file = run_dir / RECIPE
    try:
        tree = read_yaml(file)
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {error}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file}: must hold keys and values, not {type(tree).__name__}")
    return normalised(tree)


def _differences(
    recipe: Recipe, before: Mapping[str, Any], free: Sequence[tuple[str, ...]]
) -> Iterator[str]:
    """Yield a line for each key that differs, but for those that are free to change."""
    for difference in differences(recipe.model_dump(mode="json"), before):
        if not any(difference.where[: len(prefix)] == prefix for prefix in free):
            yield (
                f"{difference.key} = {show(difference.one)}: was {show(difference.other)} in the "
                "run to resume; keep it, or start a new run with checkpoint.restore"
            )
