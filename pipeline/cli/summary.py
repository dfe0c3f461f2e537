"""`python -m pipeline summary ...`: the layers of a network, their shapes and what is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, UsageError
from pipeline.core.reporter import Reporter
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.layer_table import layer_table
from pipeline.stages.record.run_directory import run_of

JSON = "--json"

HELP = """usage: python -m pipeline summary [RUN_DIR | +recipe=NAME] [KEY=VALUE ...] [--json]

List the layers of a network: path, kind, shape of the result for one sample, parameters with their
shapes and type, whether they are trained or frozen, or from which step on. Nothing is compiled, and
the dataset is read only where its sizes aren't known without.

  RUN_DIR        the network of a run, or of a checkpoint
  +recipe=NAME   the recipe, lenet5_digits unless it is given
  KEY=VALUE      keys and parts of the recipe, as for a run
  --json         one JSON object

example: python -m pipeline summary +recipe=resnet20_cifar10 'train.freeze=["!dense_0"]'
"""


def main(args: Sequence[str]) -> int:
    """Print the layers of a network; the exit status is 0.

    Raises UsageError for a flag that it doesn't have, DataError for what is no run, RecipeError for
    an invalid recipe.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    rest = [arg for arg in args if arg != JSON]
    flags = [arg for arg in rest if arg.startswith("-")]
    if flags:
        raise UsageError(flags[:1], "summary takes a run or KEY=VALUE of one recipe, and --json")
    # What reading a dataset prints is not part of the table.
    with Reporter(console=Console(stderr=True, soft_wrap=True)) as reporter:
        table = layer_table(_recipe(rest), reporter)
    if JSON in args:
        print(json.dumps(table.to_dict()))
    else:
        print(f"{table.model}, images {'x'.join(map(str, table.image))}", end="\n\n")
        print(table)
    return 0


def _recipe(args: Sequence[str]) -> Recipe:
    """The recipe of the arguments: that of a run, where the first one is no KEY=VALUE."""
    if not args or "=" in args[0]:
        return compose_and_check(args)
    run_dir = run_of(Path(args[0]))
    if run_dir is None:
        raise DataError(f"{args[0]}: is no run directory; name one, or +recipe=NAME")
    return read_run_recipe(run_dir, args[1:])
