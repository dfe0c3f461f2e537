"""Runs as processes that start in a moment: forked from one that has imported all there is.

JAX takes no harm from it as long as the process that is forked has opened no device.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.conftest import TINY

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = [
    "tests.crash.lives",
    "tests.component_modules",
    "pipeline.cli.train",
    "pipeline.stages.run",
]
CONSOLE = "console.txt"
SINK_STEPS = 1000
ARGUMENTS = (
    *TINY,
    f"train.sink_size={SINK_STEPS}",
    "checkpoint.keep=3",
    "checkpoint.best=loss",
    "eval.every_steps=250",
    "eval.every_passes=null",
)
"""LeNet-5 in sinks of 1000 steps, which neither evaluations nor checkpoints end."""


def start(arguments: Sequence[str], folder: Path) -> ForkServerProcess:
    """Start `python -m pipeline` with these arguments in a folder; what it says is kept there."""
    CONTEXT.set_forkserver_preload(IMPORTED)
    process = CONTEXT.Process(target=_live, args=(list(arguments), folder))
    process.start()
    return process


def run_directory_in(folder: Path) -> Path | None:
    """That of the run in a folder, once it has a recipe."""
    found = list(folder.glob("outputs/*/*/recipe.yaml"))
    assert len(found) <= 1, f"{folder}: a run was started anew instead of being resumed"
    return found[0].parent if found else None


def _live(arguments: list[str], folder: Path) -> None:
    from pipeline.__main__ import main

    os.chdir(folder)
    with Path(CONSOLE).open("a") as console:
        os.dup2(console.fileno(), sys.stdout.fileno())
        os.dup2(console.fileno(), sys.stderr.fileno())
    sys.exit(main(arguments))
