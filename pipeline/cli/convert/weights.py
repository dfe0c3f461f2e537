"""`python -m pipeline convert weights SOURCE TARGET ...`: rename, transpose and write weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.checkpoint.restore import read_weights_alone, warn_on_stderr
from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import add_train_length
from pipeline.config.overrides import value_of
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, RecipeError, UsageError, printable
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import (
    is_weight_file,
    require_writable_suffix,
    write_weights,
)
from pipeline.stages.export.matching import convert_to_foreign_names, format_table, match_weights
from pipeline.stages.export.network import trace_network_arrays
from pipeline.stages.fine_tuning import read_source
from pipeline.stages.record.continuity import explain_other_version
from pipeline.stages.record.run_directory import find_run_dir, note_descendant
from pipeline.stages.record.trained_run import read_run_recipe


def main(
    source: Path,
    target: Path,
    overrides: Sequence[str] = (),
    rules: str | None = None,
    *,
    partial: bool = False,
    like: Path | None = None,
) -> CommandResult:
    """Read weights, give them the names and layout of a recipe's network, and write them.

    `source` is a weight file or a run. If `overrides` name no recipe, they change the run's
    recipe. Arrays of a weight file are written unchanged without overrides. If `like` is a weight
    file, its names, layout and dtypes are used. `like`, `rules` and `partial` need a network, a
    run's or a recipe's. Raises UsageError, RecipeError and DataError before anything is written.
    """
    require_writable_suffix(target)
    run_dir = None if is_weight_file(source) else find_run_dir(source)
    if run_dir is None and not overrides:
        options = [] if rules is None else [f"--rules {rules}"]
        options += ["--partial"] if partial else []
        options += [] if like is None else [f"--like {like}"]
        if options:
            raise UsageError(options, "needs a recipe, whose network the arrays are of")
    overrides = [*overrides, *([] if rules is None else [f"checkpoint.rules={rules}"])]
    overrides += ["checkpoint.partial=true"] if partial else []
    try:
        arrays = _read_converted(source, run_dir, overrides, like)
    except (RecipeError, DataError):
        if run_dir is None or overrides or like is not None:
            raise
        problem = explain_other_version(run_dir)
        if problem is None:
            raise
        # Another version's recipe and host state may be invalid here; its arrays are readable.
        warn_on_stderr(problem)
        arrays = read_weights_alone(source)
    write_weights(target, arrays)
    if run_dir is not None:
        note_descendant(run_dir, "converted", target)
    size_bytes = sum(array.nbytes for array in arrays.values())
    print(f"{printable(str(target))}: {len(arrays):,} arrays, {size_bytes / 1e6:,.1f} MB")
    return CommandResult({"file": str(target), "arrays": len(arrays), "bytes": size_bytes})


def _read_converted(
    source: Path, run_dir: Path | None, overrides: Sequence[str], like: Path | None
) -> Arrays:
    """Return the arrays of a source, under the names of the recipe's network if one is known."""
    recipe: Recipe | None = None
    if value_of(overrides, "recipe") is None and run_dir is not None:
        recipe = read_run_recipe(run_dir, overrides)
    elif overrides:
        recipe = compose_and_check(add_train_length(overrides))
    arrays, _ = read_source(source)
    return arrays if recipe is None else _convert(arrays, source, recipe, like)


def _convert(arrays: Arrays, source: Path, recipe: Recipe, like: Path | None) -> Arrays:
    """Return the arrays under the names of a recipe's network, or of the file `like`."""
    spec = recipe.checkpoint
    network = trace_network_arrays(recipe)
    matching = match_weights(str(source), arrays, network, spec.renames, spec.rules)
    matching.require(partial=spec.partial)
    print(format_table(matching.rows, limit=None))
    print(f"{printable(str(source))}: {matching.format_counts()}")
    if like is None:
        return matching.arrays
    return convert_to_foreign_names(str(like), read_source(like)[0], matching.arrays, network)
