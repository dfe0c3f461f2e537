"""`python -m pipeline export RUN_DIR FOLDER`: a trained network that needs no recipe any more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import DataError, UsageError, printable
from pipeline.weights.export import export_run, holds_other_files
from pipeline.weights.run import read_trained_run

USAGE = "export takes RUN_DIR FOLDER"


def export(args: Sequence[str]) -> int:
    """Write the network of a run, with its newest weights; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError where the run can't be read,
    RunError where the folder can't be written. One that holds something else is left alone.
    """
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise UsageError(args, USAGE)
    source, folder = map(Path, args)
    run = read_trained_run(source)
    if holds_other_files(folder):
        raise DataError(f"{folder}: holds something else than an export; name another folder")
    export_run(run, folder)
    what = f"{run.recipe.model.name} of step {run.step}, {len(run.samples.classes)} classes"
    print(printable(f"{folder}: {what}"))
    return 0
