"""The run to resume: found, and compared with the recipe that resumes it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml
from pipeline.core.files.tree_diff import find_value
from pipeline.core.files.value_text import join_first
from pipeline.stages.record.continuity import (
    explain_other_version,
    is_fork,
    require_readable_version,
)
from pipeline.stages.record.recorded_recipe import (
    FREE_TO_CHANGE,
    LENGTH,
    find_changes,
    read_recorded_recipe,
)
from pipeline.stages.record.run_directory import (
    OUTPUTS,
    RECIPE,
    is_free,
    read_status,
    read_written_at_ns,
)
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.parallel_spec import ParallelSpec

if TYPE_CHECKING:
    from pipeline.stages.runner.context import RunContext

KEEP_ADVICE = "keep it, or start a new run with checkpoint.restore"
FREE_AT_SAME_LENGTH = tuple(key for key in FREE_TO_CHANGE if key not in LENGTH)
"""Keys that a run may change if `train.resume=auto` finds it."""


def find_run_to_resume(recipe: Recipe, outputs: Path = OUTPUTS) -> Path | None:
    """Return the run directory of `train.resume`; None if it is null or `auto` finds no run.

    `auto` finds the newest run of the recipe that isn't done and that no process is writing. Raises
    RecipeError if the named directory isn't a run, or if its recipe would train to other losses.
    """
    resume = recipe.train.resume
    if resume is None:
        return None
    if resume != "auto":
        if changes := list_changes(recipe, _read_recipe_to_resume(resume)):
            raise RecipeError(changes)
        return Path(resume)
    for run_dir in _list_unfinished(outputs):
        with suppress(RecipeError):  # a recipe that can't be read
            if not list_changed_keys(recipe, run_dir) and is_free(run_dir):
                return run_dir
    return None


def _list_unfinished(outputs: Path) -> Iterator[Path]:
    """Yield the directories of runs that aren't done, the newest first."""
    files = sorted(outputs.glob(f"*/*/{RECIPE}"), key=read_written_at_ns)
    for run_dir in [file.parent for file in reversed(files)]:
        # The status is checked first, since nearly all runs are done and recipes parse slowly.
        if read_status(run_dir) != "done":
            yield run_dir


def describe_no_run(recipe: Recipe, outputs: Path = OUTPUTS) -> str:
    """Return why `train.resume=auto` starts a new run. It names the newest unfinished run that
    differs in its length alone, the keys that differ, and how to continue it."""
    for run_dir in _list_unfinished(outputs):
        if problem := explain_other_version(run_dir):
            return f"{problem}; starting a new run"
        with suppress(RecipeError):  # a recipe that can't be read
            changes = _find_length_changes(recipe, run_dir)
            if changes and is_free(run_dir):
                keys = join_first(changes, 3)
                return (
                    f"the unfinished run {run_dir} has another length ({keys}); starting a new "
                    f"run; train.resume={run_dir} continues that one with the new length"
                )
    return "no unfinished run of this recipe; starting a new one"


def _find_length_changes(recipe: Recipe, run_dir: Path) -> list[str]:
    """Return the keys of the length that differ in a run directory; none if others differ too.

    Raises RecipeError if the recipe can't be read.
    """
    recorded = _read_recipe_to_resume(str(run_dir))
    with suppress(RecipeError):  # a length for another deadline, which differs
        recipe = keep_length(recipe, recorded, run_dir)
    if list_changes(recipe, recorded):
        return []
    tree = recipe.model_dump(mode="json")
    return [str(change) for change in find_changes(tree, recorded, FREE_AT_SAME_LENGTH)]


def keep_shards(recipe: Recipe) -> Recipe:
    """Return the recipe with `parallel` of the run that `train.resume` names, for one device.

    So one device with `parallel.mode=none` resumes a run of several devices with the same numbers.
    Other recipes are returned unchanged. Raises RecipeError if the run's recipe can't be read.
    """
    resume = recipe.train.resume
    if recipe.parallel.mode != "none" or resume in (None, "auto"):
        return recipe
    recorded = _read_recipe_to_resume(str(resume)).get("parallel")
    with suppress(TypeError, ValueError):
        earlier = ParallelSpec.model_validate({**dict(recorded or {}), "devices": 1, "mesh": None})
        if earlier.is_data_parallel and earlier.shards is not None:
            return recipe.model_copy(update={"parallel": earlier})
    return recipe


def keep_length(recipe: Recipe, recorded: Mapping[str, Any], run_dir: Path | str) -> Recipe:
    """Return the recipe with the length that the run to resume chose by its deadline.

    A recipe without a deadline, or whose run hasn't chosen yet, is returned unchanged. Raises
    RecipeError if the run's length is for another deadline than the recipe's, or for none.
    """
    train = recipe.train
    lengths = {path[-1]: find_value(recorded, path) for path in LENGTH}
    if train.deadline is None or not any(
        lengths[key] for key in ("epochs", "sink_epochs", "steps")
    ):
        return recipe
    planned_for = find_value(recorded, ("train", "planned_for"))
    if train.deadline != planned_for:
        advice = "leave it out to keep that length"
        problem = f"{run_dir} has its length for {planned_for or 'no deadline'}; {advice}"
        raise RecipeError(f"train.{train.deadline}: {problem}")
    update = {**lengths, "planned_for": planned_for}
    return recipe.model_copy(update={"train": train.model_copy(update=update)})


def list_changed_keys(recipe: Recipe, run_dir: Path) -> list[str]:
    """Return a line for each key that differs in a run directory's recipe, length included.

    Raises RecipeError if the recipe can't be read, or is of another version.
    """
    require_readable_version(run_dir)
    try:
        # First without defaults for newer keys, which take long: a recipe of this version has all.
        recorded = parse_written_yaml(read_text(run_dir / RECIPE, MAX_BYTES))
    except (OSError, ValueError):
        recorded = None
    if isinstance(recorded, dict) and not list_changes_with_length(recipe, recorded, run_dir):
        return []
    return list_changes_with_length(recipe, _read_recipe_to_resume(str(run_dir)), run_dir)


def list_changes_with_length(
    recipe: Recipe, recorded: Mapping[str, Any], run_dir: Path | str
) -> list[str]:
    """Return a line for each key that differs from a recorded recipe, length included."""
    try:
        recipe = keep_length(recipe, recorded, run_dir)
    except RecipeError as error:
        return list(error.problems)
    return list_changes(recipe, recorded, FREE_AT_SAME_LENGTH)


def _read_recipe_to_resume(run_dir: str) -> Mapping[str, Any]:
    """Read the recipe of a run to resume. Raises RecipeError if it can't be read, or if the run was
    written by a version whose runs this one can't resume."""
    require_readable_version(Path(run_dir))
    try:
        return read_recorded_recipe(Path(run_dir))
    except DataError as error:
        reason = f"must be a run directory; {RECIPE} can't be read from it"
        raise RecipeError(f"train.resume = {run_dir}: {reason}") from error


def list_changes(
    recipe: Recipe, recorded: Mapping[str, Any], free: Sequence[tuple[str, ...]] = FREE_TO_CHANGE
) -> list[str]:
    """Return a line for each key that differs from the recorded recipe, except `free` keys."""
    return [
        f"{change} in the run to resume; {KEEP_ADVICE}"
        for change in find_changes(recipe.model_dump(mode="json"), recorded, free)
    ]


class ResumedRun(RunFeature):
    """The run that `train.resume` names or finds."""

    def fit(self, recipe: Recipe, processes: int) -> Recipe:
        """Return the recipe with the shards of that run."""
        return keep_shards(recipe)

    def find_run(self, recipe: Recipe) -> Path | None:
        """Return its directory. Raises RecipeError if its recipe would train to other losses."""
        return find_run_to_resume(recipe)

    def resume(self, recipe: Recipe, run_dir: Path) -> Recipe:
        """Return the recipe; a fork's doesn't name the fork, as if the run had made all
        steps."""
        if not is_fork(run_dir):
            return recipe
        return recipe.model_copy(update={"train": recipe.train.model_copy(update={"resume": None})})

    def begin(self, context: RunContext) -> None:
        """Say why `train.resume=auto` starts a new run."""
        is_new = context.recipe.train.resume == "auto" and not context.resuming
        if is_new and context.ranks.is_first:
            context.reporter.print_stage("resume", describe_no_run(context.recipe))
