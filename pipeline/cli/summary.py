"""`python -m pipeline summary ...`: the layers of a network, their shapes and what is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError
from pipeline.core.reporter import Reporter
from pipeline.stages.export.trained_run import read_run_recipe
from pipeline.stages.layer_table import layer_table
from pipeline.stages.record.run_directory import run_of


def main(overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Print the layers of a network; the exit status is 0.

    Raises DataError if the first argument is neither a run nor KEY=VALUE, RecipeError for an
    invalid recipe.
    """
    # What reading a dataset prints is not part of the table.
    with Reporter(console=Console(stderr=True, soft_wrap=True)) as reporter:
        table = layer_table(_read_recipe(overrides), reporter)
    if as_json:
        print(json.dumps(table.to_dict()))
    else:
        print(f"{table.model}, images {'x'.join(map(str, table.image))}", end="\n\n")
        print(table)
    return 0


def _read_recipe(args: Sequence[str]) -> Recipe:
    """Return the recipe of the arguments, or of the run that the first one names."""
    if not args or "=" in args[0]:
        return compose_and_check(args)
    run_dir = run_of(Path(args[0]))
    if run_dir is None:
        raise DataError(f"{args[0]}: is no run directory; name one, or +recipe=NAME")
    return read_run_recipe(run_dir, args[1:])
