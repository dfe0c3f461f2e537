"""Runs as forked processes that start in a moment, since everything is already imported.

This is safe for JAX as long as the forking process has opened no device.
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
PRELOADED = [
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
    "eval.every_epochs=null",
)
"""LeNet-5 in sinks of 1000 steps, which neither evaluations nor checkpoints end."""


def start(arguments: Sequence[str], folder: Path) -> ForkServerProcess:
    """Start `python -m pipeline` in a folder; its output goes to a file there."""
    CONTEXT.set_forkserver_preload(PRELOADED)
    process = CONTEXT.Process(target=_run_command, args=(list(arguments), folder))
    process.start()
    return process


def find_run_dir(folder: Path) -> Path | None:
    """Return the directory of the run in a folder, once it has a recipe."""
    recipes = list(folder.glob("outputs/*/*/recipe.yaml"))
    assert len(recipes) <= 1, f"{folder}: a run was started anew instead of being resumed"
    return recipes[0].parent if recipes else None


def _run_command(arguments: list[str], folder: Path) -> None:
    from pipeline.__main__ import main
    from pipeline.core.host.signals import interrupt_command

    interrupt_command()
    os.chdir(folder)
    with Path(CONSOLE).open("a") as console:
        os.dup2(console.fileno(), sys.stdout.fileno())
        os.dup2(console.fileno(), sys.stderr.fileno())
    sys.exit(main(arguments))
