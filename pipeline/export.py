"""`python -m pipeline export RUN_DIR FOLDER`: a trained network that needs no recipe any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import DataError, RecipeError
from pipeline.weights.export import export_run, is_export
from pipeline.weights.run import read_trained_run

USAGE = "export takes RUN_DIR FOLDER"


def export(args: Sequence[str]) -> int:
    """Write the network of a run, with its newest weights; the exit status is 0.

    Raises RecipeError and DataError; a folder that holds something else is left alone.
    """
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise RecipeError([f"{' '.join(args) or 'nothing'}: {USAGE}"])
    source, folder = map(Path, args)
    run = read_trained_run(source)
    if folder.exists() and not is_export(folder) and (folder.is_file() or any(folder.iterdir())):
        raise DataError(f"{folder}: holds something else than an export; name another folder")
    export_run(run, folder)
    print(
        f"{folder}: {run.recipe.model.name} of step {run.step}, {len(run.samples.classes)} classes"
    )
    return 0
