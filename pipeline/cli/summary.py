"""`python -m pipeline summary ...`: the layers of a network, their shapes and what is trained."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from pipeline.config.compose import compose_and_check
from pipeline.core.errors import DataError
from pipeline.core.reporter import Reporter, make_console
from pipeline.stages.layer_table import LayerTable, make_layer_table
from pipeline.stages.record.run_directory import describe_missing_run, find_run_dir
from pipeline.stages.record.trained_run import read_run_recipe


def main(overrides: Sequence[str], *, as_json: bool = False) -> int:
    """Print the layers of a network; the exit status is 0.

    Raises DataError if the first argument is neither a run nor KEY=VALUE, RecipeError for an
    invalid recipe.
    """
    if not overrides or "=" in overrides[0]:
        recipe = compose_and_check(overrides)
    else:
        run_dir = find_run_dir(Path(overrides[0]))
        if run_dir is None:
            raise DataError(
                f"{describe_missing_run(Path(overrides[0]))}; +recipe=NAME names a recipe"
            )
        recipe = read_run_recipe(run_dir, overrides[1:])
    # Progress of reading the dataset goes to stderr, and the table to stdout.
    with Reporter(console=make_console(stderr=True)) as reporter:
        table = make_layer_table(recipe, reporter)
    if as_json:
        print(json.dumps(table.to_dict()))
    else:
        print(f"{table.model}, {_describe_inputs(table)}", end="\n\n")
        print(table)
    return 0


def _describe_inputs(table: LayerTable) -> str:
    """Return the names and shapes of the network's inputs."""
    return ", ".join(
        f"{name} {'x'.join(map(str, shape)) or 'number'}" for name, shape in table.inputs.items()
    )
