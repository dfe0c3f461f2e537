"""`python -m pipeline convert weights SOURCE TARGET ...`: rename, transpose and write weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.chosen import untrained
from pipeline.config.compose import compose_and_check
from pipeline.config.overrides import key_of, value_of
from pipeline.config.recipe import Recipe
from pipeline.core.errors import UsageError, printable
from pipeline.models.weights.files.named_arrays import Arrays, total_bytes
from pipeline.models.weights.files.weight_files import (
    is_weight_file,
    require_written,
    write_weights,
)
from pipeline.stages.export.foreign_names import under_foreign_names
from pipeline.stages.export.matching import match_weights, table
from pipeline.stages.export.network import network_arrays
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.record.descendants import note_descendant
from pipeline.stages.record.run_directory import run_of
from pipeline.stages.warm_start import read_source

SHORT = {"rules": "checkpoint.rules", "partial": "checkpoint.partial"}
"""Keys that may be given without their section: no other section matters to this command."""
LIKE = "like"
USAGE = (
    "convert weights takes SOURCE TARGET, +recipe=NAME, like=FILE and KEY=VALUE, as in: "
    "convert weights resnet.pth weights.safetensors +recipe=resnet18_cifar10 rules=torch"
)
HELP = """usage: python -m pipeline convert weights SOURCE TARGET [+recipe=NAME] [KEY=VALUE ...]

Read weights, give them the names and layout of a recipe's network, and write them. Without a recipe
they are written as they are.

  SOURCE         .safetensors, .ckpt, .pt, .pth or .npz, or a run directory, whose recipe counts
  TARGET         .safetensors, .ckpt or .npz
  +recipe=NAME   the recipe whose network they are for
  rules=NAME     whose names SOURCE has: auto, none, torch or mindspore
  partial=true   take what matches
  like=FILE      write them under the names of FILE
  KEY=VALUE      other keys of the recipe

example: python -m pipeline convert weights theirs.pth ours.safetensors +recipe=resnet18_cifar10
"""


def main(args: Sequence[str]) -> int:
    """Read weights, give them the names and layout of a recipe's network, and write them.

    SOURCE is a weight file, or the directory of a run, whose recipe is then used. Without a recipe
    the entries are written unchanged. `like=FILE` writes them under the names and in the layout of
    that file. Raises UsageError, RecipeError and DataError; nothing is written then.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    words = [arg for arg in args if "=" not in arg]
    if len(words) != 2 or any(word.startswith("-") for word in words):
        raise UsageError(words, USAGE)
    source, target = map(Path, words)
    require_written(target)
    options = [arg for arg in args if "=" in arg]
    like = value_of(options, LIKE)
    recipe = _recipe([option for option in options if key_of(option) != LIKE], source)
    if recipe is None and like is not None:
        raise UsageError([f"{LIKE}={like}"], "needs a recipe, whose network both files are of")
    arrays, _ = read_source(source)
    if recipe is not None:
        arrays = _convert(arrays, source, recipe, like)
    write_weights(target, arrays)
    run_dir = None if is_weight_file(source) else run_of(source)
    if run_dir is not None:
        note_descendant(run_dir, "converted", target)
    print(f"{printable(str(target))}: {len(arrays):,} arrays, {total_bytes(arrays) / 1e6:,.1f} MB")
    return 0


def _convert(arrays: Arrays, source: Path, recipe: Recipe, like: str | None) -> Arrays:
    """The arrays under the names of a recipe's network, or of the file `like`."""
    spec, network = recipe.checkpoint, network_arrays(recipe)
    matching = match_weights(str(source), arrays, network, spec.renames, spec.rules)
    matching.require(partial=spec.partial)
    print(table(matching.rows, limit=None))
    print(f"{printable(str(source))}: {matching.counts()}")
    if like is None:
        return matching.arrays
    return under_foreign_names(like, read_source(Path(like))[0], matching.arrays, network)


def _recipe(overrides: Sequence[str], source: Path) -> Recipe | None:
    """The recipe that names and shapes come from; None where the arguments name none."""
    written = [_in_full(override) for override in overrides]
    run_dir = None if is_weight_file(source) else run_of(source)
    if value_of(written, "recipe") is None and run_dir is not None:
        return read_run_recipe(run_dir, written)
    return compose_and_check(untrained(written)) if written else None


def _in_full(override: str) -> str:
    key = key_of(override)
    return f"{SHORT[key]}={override.partition('=')[2]}" if key in SHORT else override
