"""`python -m pipeline reproduce RUN_DIR`: does a run give the same numbers again, here and now?

The recipe is run anew, by a process of its own in the folder where the run was begun, with the
lowerings that the run had. Its losses are compared step by step; where they are not the same, so is
what else may have made the difference.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from pipeline import run_directory
from pipeline.config.compose import check_tree, key_of, value_of
from pipeline.diff import describe, describe_steps, show_origins, show_section
from pipeline.errors import DataError, RecipeError, RunError
from pipeline.observe.comparison import Comparison, compare_steps
from pipeline.observe.metrics_log import METRICS
from pipeline.observe.run_record import (
    RunRecord,
    compare_origins,
    compare_outcomes,
    read_record,
)
from pipeline.run_directory import LOWERINGS, RECIPE
from pipeline.shipped import PACKAGE

USAGE = "reproduce takes RUN_DIR and KEY=VALUE"
RUN_DIR = "hydra.run.dir"
LOOKS_S = 0.2
"""How often it is looked how far the new run has come."""
TAIL_BYTES = 4096
"""The last line of a log is shorter than that."""


@dataclass(frozen=True)
class Asked:
    """What the arguments say."""

    source: Path
    overrides: tuple[str, ...]
    run_dir: str | None


def reproduce(args: Sequence[str]) -> int:
    """Run a recipe again and compare; the exit status is 0 where all is the same, else 1.

    A run that ended early is repeated as far as it went. Raises RecipeError and DataError where the
    run can't be read, RunError where it can't be run again.
    """
    asked = _parse(args)
    kept = read_record(asked.source)
    name = check_tree(dict(kept.recipe)).name
    steps = last_step(kept.run_dir / METRICS)
    if steps is None:
        raise DataError(f"{kept.run_dir / METRICS}: has no step to compare with")
    run_dir = (
        run_directory.make(Path(asked.run_dir))
        if asked.run_dir
        else run_directory.create(f"{name}_reproduced")
    )
    _take_lowerings(kept.run_dir, run_dir)
    status = _rerun(kept, run_dir, asked.overrides, None if kept.status == "done" else steps)
    if status == RecipeError.exit_status:
        return status
    return judge(kept, read_record(run_dir))


def _parse(args: Sequence[str]) -> Asked:
    words = [arg for arg in args if "=" not in arg]
    if len(words) != 1 or words[0].startswith("-"):
        raise RecipeError([f"{' '.join(args) or 'nothing'}: {USAGE}"])
    overrides = tuple(arg for arg in args if arg not in words and key_of(arg) != RUN_DIR)
    return Asked(Path(words[0]), overrides, value_of(args, RUN_DIR))


def _take_lowerings(source: Path, target: Path) -> None:
    """How convolutions were computed is part of what makes a run repeat itself."""
    if (source / LOWERINGS).is_file() and not (source / LOWERINGS).is_symlink():
        try:
            shutil.copy(source / LOWERINGS, target / LOWERINGS)
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}") from error


def _rerun(kept: RunRecord, run_dir: Path, overrides: Sequence[str], steps: int | None) -> int:
    """Run the recipe in a process of its own, up to step `steps` or its end; its exit status."""
    recipe = kept.run_dir.absolute() / RECIPE
    asked = [f"+recipe={recipe}", "train.resume=null", f"{RUN_DIR}='{run_dir.absolute()}'"]
    # -P: the folder is what a run says, and what lies there must not be imported.
    command = [sys.executable, "-P", "-m", "pipeline", *asked, *overrides]
    folder = Path(str(kept.made_by.get("folder", ".")))
    paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    cwd = folder if folder.is_dir() else Path.cwd()
    with subprocess.Popen(command, cwd=cwd, env=environment) as process, _stopped_with(process):
        while process.poll() is None:
            if steps is not None and (last_step(run_dir / METRICS) or 0) >= steps:
                process.terminate()
                steps = None
            time.sleep(LOOKS_S)
    return process.returncode


@contextmanager
def _stopped_with(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Meanwhile, whoever stops this process stops that one, which then saves what it has."""
    before = signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    try:
        yield
    except KeyboardInterrupt:
        # The terminal has interrupted both.
        process.wait()
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def last_step(log: Path) -> int | None:
    """The step of the last whole line of a log; None where there is none.

    Raises DataError for a line that is no step.
    """
    if not log.is_file():
        return None
    try:
        with log.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            lines = file.read().split(b"\n")[:-1]
    except OSError:
        return None
    try:
        return int(json.loads(lines[-1])["step"]) if lines else None
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
        raise DataError(f"{log}: its last line is not a step of a run") from error


def judge(kept: RunRecord, repeated: RunRecord) -> int:
    """Say what came of it: 0 where all that was kept has come again, else 1."""
    console = Console(highlight=False, markup=False)
    for letter, record in (("A", kept), ("B", repeated)):
        console.print(f"{letter}  {describe(record)}", soft_wrap=True)
    if not (repeated.run_dir / METRICS).exists():
        raise RunError(f"{repeated.run_dir}: {repeated.summary.get('reason', 'has no steps')}")
    found = compare_steps(kept.run_dir / METRICS, repeated.run_dir / METRICS)
    console.print(f"{'steps':<12} {describe_steps(found)}", soft_wrap=True)
    metrics = [
        difference
        for difference in compare_outcomes(kept, repeated)
        if difference.where[0] == "metrics" and kept.status == "done"
    ]
    show_section(console, "metrics", metrics)
    same = found.first is None and not found.only_one and not metrics
    if not same:
        show_origins(console, kept, repeated)
    elif changed := _changed_keys(kept, repeated):
        console.print(f"{'although':<12} {', '.join(changed)} differ", soft_wrap=True)
    console.print(f"{'verdict':<12} {_verdict(same, found, kept)}", soft_wrap=True)
    return 0 if same else 1


def _changed_keys(kept: RunRecord, repeated: RunRecord) -> list[str]:
    found = compare_origins(kept, repeated).values()
    return [difference.key for section in found for difference in section or ()]


def _verdict(same: bool, found: Comparison, kept: RunRecord) -> str:
    if same:
        return f"reproduced: {found.steps:,} steps are the same, bit for bit"
    if found.first is None and found.only_one:
        return f"not reproduced: the new run lacks the last {found.only_one:,} steps"
    resumed = len(kept.processes) > 1
    note = "; A was resumed, and may have been given another length" if resumed else ""
    return f"not reproduced{note}"
