"""`python -m pipeline reproduce RUN_DIR`: repeat a run here and compare its losses bit for bit.

Another process runs the recipe again, with the run's lowerings, in the folder in which the run was
started. Losses are compared step by step. If they differ, recipes, code, versions, data and
machines are compared too.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import check_tree
from pipeline.config.overrides import get_key, quote_value
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.paths import PACKAGE
from pipeline.core.files.tree_diff import Difference
from pipeline.core.host.signals import find_stops
from pipeline.engine.monitors.log_lines import METRICS, last_step
from pipeline.stages.record import run_directory
from pipeline.stages.record.continuity import explain_other_version
from pipeline.stages.record.run_directory import LOWERINGS, RECIPE, note_descendant
from pipeline.stages.record.run_record import (
    Comparison,
    RunRecord,
    SideBySide,
    compare_origins,
    compare_outcomes,
    compare_steps,
    differences_to_dicts,
    read_record,
)

RUN_DIR = "hydra.run.dir"
RESUME = "train.resume"
POLL_S = 0.2
"""Seconds between two readings of the new run's last step."""


def main(run_dir: Path, overrides: Sequence[str] = (), out: Path | None = None) -> CommandResult:
    """Run a recipe again in `out` and compare losses and metrics.

    The exit status is 0 if they are the same, 1 if not, and the new run's if its recipe is invalid.
    A run that ended early is repeated up to its last step. If `out` is None, a folder is created.
    Raises UsageError if overrides have `train.resume`, RecipeError and DataError if the run can't
    be read, RunError if it can't be run again.
    """
    if resume := [override for override in overrides if get_key(override) == RESUME]:
        raise UsageError(resume, "goes on with a run, but reproduce makes a new one; leave it out")
    original = read_record(run_dir)
    name = _read_name(original)
    steps = last_step(original.run_dir / METRICS)
    if steps is None:
        raise DataError(f"{original.run_dir / METRICS}: has no step to compare with")
    if out is None:
        repeated_dir = run_directory.create_run_dir(f"{name}_reproduced")
    else:
        repeated_dir = run_directory.make_run_dir(out)
    _copy_lowerings(original.run_dir, repeated_dir)
    last = None if original.status == "done" else steps
    status = _rerun(original, repeated_dir, overrides, last)
    if not (repeated_dir / RECIPE).exists():
        (repeated_dir / LOWERINGS).unlink(missing_ok=True)
        if out is None:
            with suppress(OSError):
                repeated_dir.rmdir()
        if status != RecipeError.exit_status:
            text = f"the new run ended before it began, exit status {status}"
            raise RunError(f"{repeated_dir}: {text}")
    if status == RecipeError.exit_status:
        return CommandResult({"run": None}, status)
    note_descendant(original.run_dir, "reproduced", repeated_dir)
    return compare_and_report(original, read_record(repeated_dir))


def _read_name(record: RunRecord) -> str:
    """Return the name of a run's recipe. Raises RecipeError, with another version that wrote it."""
    try:
        return check_tree(dict(record.recipe)).name
    except RecipeError as error:
        if problem := explain_other_version(record.run_dir):
            raise RecipeError([problem, *error.problems]) from error
        raise


def _copy_lowerings(source: Path, target: Path) -> None:
    """Copy a run's file of lowerings, since other lowerings of convolutions change the losses."""
    if (source / LOWERINGS).is_file() and not (source / LOWERINGS).is_symlink():
        try:
            write_whole(target / LOWERINGS, read_bytes(source / LOWERINGS))
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{source / LOWERINGS}: {error}") from error


def _rerun(original: RunRecord, run_dir: Path, overrides: Sequence[str], last: int | None) -> int:
    """Run the recipe in another process, up to about step `last` or, if None, to its end.

    Returns the exit status of the process.
    """
    recipe = original.run_dir.absolute() / RECIPE
    run_dir_key = f"{RUN_DIR}={quote_value(str(run_dir.absolute()))}"
    keys = [f"+recipe={recipe}", f"{RESUME}=null", run_dir_key]
    # -P: the folder comes from the run's files, and modules in it must not be imported.
    command = [sys.executable, "-P", "-m", "pipeline", *keys, *overrides]
    try:
        stdout = sys.stdout.fileno()
    except OSError:  # stdout isn't a file, as in a test
        stdout = None
    folder = Path(str(original.first_process.get("folder", ".")))
    paths = [str(PACKAGE.parent)]
    if python_path := os.environ.get("PYTHONPATH"):
        paths.append(python_path)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    cwd = folder if folder.is_dir() else Path.cwd()
    with (
        subprocess.Popen(command, cwd=cwd, env=environment, stdout=stdout) as process,
        _pass_signals_to(process),
    ):
        while process.poll() is None:
            if last is not None and (last_step(run_dir / METRICS) or 0) >= last:
                process.terminate()
                last = None  # a second signal would end it before it has saved its state
            time.sleep(POLL_S)
    return process.returncode


@contextmanager
def _pass_signals_to(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """During the block, pass signals that stop this process to `process`, which saves its state."""
    # Ctrl-C and the end of a terminal reach both processes; `kill` reaches this one alone.
    numbers = [number for number in find_stops() if number != signal.SIGINT]
    previous_handlers = {
        number: signal.signal(number, lambda *_: process.terminate()) for number in numbers
    }
    try:
        yield
    except KeyboardInterrupt:
        # The terminal has interrupted both processes.
        process.wait()
        raise
    except Exception:
        process.terminate()
        raise
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def compare_and_report(original: RunRecord, repeated: RunRecord) -> CommandResult:
    """Print the comparison; the exit status is 0 if steps and metrics are the same, else 1.

    Raises DataError if a log can't be read, RunError if the repeated run has no log.
    """
    if not (repeated.run_dir / METRICS).exists():
        raise RunError(f"{repeated.run_dir}: {repeated.summary.get('reason', 'has no steps')}")
    steps = compare_steps(original.run_dir / METRICS, repeated.run_dir / METRICS)
    metrics: list[Difference] | None = None
    if original.status == "done":
        outcomes = compare_outcomes(original, repeated)
        metrics = [difference for difference in outcomes if difference.path[0] == "metrics"]
    is_same = steps.first is None and not steps.only_one and not metrics
    side_by_side = SideBySide(original, repeated)
    side_by_side.show_steps(steps)
    side_by_side.show_differences("metrics", metrics)
    if not is_same:
        side_by_side.show_origins()
    else:
        sections = compare_origins(original, repeated).values()
        if keys := [difference.key for section in sections for difference in section or ()]:
            side_by_side.show_text("although", f"{', '.join(keys)} differ")
    verdict = _describe_verdict(is_same, steps, original)
    side_by_side.show_text("verdict", verdict)
    facts = {
        "run": str(repeated.run_dir),
        "same": is_same,
        "verdict": verdict,
        "steps": asdict(steps),
        "metrics": differences_to_dicts(metrics),
    }
    return CommandResult(facts, exit_status=0 if is_same else 1)


def _describe_verdict(is_same: bool, steps: Comparison, original: RunRecord) -> str:
    if is_same:
        return f"reproduced: {steps.steps:,} steps are the same, bit for bit"
    if steps.first is None and steps.only_one:
        return f"not reproduced: the new run lacks the last {steps.only_one:,} steps"
    was_resumed = len(original.processes) > 1
    note = "; A was resumed, perhaps with another length" if was_resumed else ""
    return f"not reproduced{note}"
