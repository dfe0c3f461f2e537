"""Bundle of a step: all that computes it again, for another machine without the run and its data.

    FOLDER/  recipe.yaml  lowerings.json  arrays.npz  step.json  samples.csv

It is a reproducer (inspect/autopsy/on_failure.py) with the facts of the step.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import convert_write_errors, try_hold_folder, write_whole
from pipeline.core.files.csv_file import format_csv
from pipeline.core.files.folder_write import make_folder, remove_if_failed
from pipeline.data.batch import Batch
from pipeline.inspect.autopsy.on_failure import FILES, STEP, Reproducer, read_inputs, write_inputs
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig

KEY = "facts"
SAMPLES = "samples.csv"


def is_bundle(folder: Path) -> bool:
    """Return whether a folder has the files of a bundle."""
    return (folder / STEP).is_file()


def require_empty(folder: Path) -> None:
    """Raise DataError for a path that isn't an empty folder, unless nothing is there."""
    if not os.path.lexists(folder):
        return
    if folder.is_symlink() or not folder.is_dir() or any(folder.iterdir()):
        raise DataError(f"--out {folder}: must be an empty folder; it is made if it doesn't exist")


def write_bundle(
    folder: Path,
    run_dir: Path,
    config: StepConfig,
    state: TrainState,
    batch: Batch,
    facts: Mapping[str, Any],
) -> None:
    """Write a bundle, whose `facts` have a list of `samples`.

    `folder` is new or empty, and stays so if the bundle can't be written: then RunError is raised,
    or DataError if another process has written into it.
    """
    with (
        convert_write_errors(folder),
        make_folder(folder),
        try_hold_folder(folder) as is_held,
        remove_if_failed(folder, (SAMPLES, *FILES) if is_held else ()),
    ):
        if not is_held:
            raise RunError(f"{folder}: another process is writing a bundle there")
        # Checked under the lock, since two processes may have found the folder empty.
        require_empty(folder)
        write_whole(folder / SAMPLES, format_csv(facts["samples"]))
        write_inputs(folder, run_dir, config, state, batch, {KEY: facts})


def read_bundle(folder: Path) -> Reproducer:
    """Read a bundle. Raises DataError, RecipeError and RunError."""
    return read_inputs(folder, KEY, "samples")
