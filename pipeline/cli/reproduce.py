"""`python -m pipeline reproduce RUN_DIR`: repeat a run here and compare its losses bit for bit.

The recipe is run again, by a process of its own in the folder where the run was started, with the
lowerings that the run used. Losses are compared step by step; where they differ, so are recipe,
code, versions, data and machine.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.compose import check_tree
from pipeline.config.overrides import key_of, quoted, value_of
from pipeline.core.errors import DataError, RecipeError, RunError, UsageError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.package_paths import PACKAGE
from pipeline.core.files.tree_diff import Difference
from pipeline.core.host.signals import find_stops
from pipeline.engine.monitors.log_lines import METRICS, last_step
from pipeline.stages.record import run_directory
from pipeline.stages.record.compare_steps import Comparison, compare_steps
from pipeline.stages.record.descendants import note_descendant
from pipeline.stages.record.run_directory import LOWERINGS, RECIPE
from pipeline.stages.record.run_record import (
    RunRecord,
    compare_origins,
    compare_outcomes,
    read_record,
)
from pipeline.stages.record.side_by_side import SideBySide

USAGE = "reproduce takes RUN_DIR and KEY=VALUE"
HELP = """usage: python -m pipeline reproduce RUN_DIR [KEY=VALUE ...] [hydra.run.dir=DIR]

Run the recipe of a run again, here and now, and compare the losses step by step, bit for bit.

  RUN_DIR             the run to repeat
  KEY=VALUE           keys to change, such as cache.root=DIR
  hydra.run.dir=DIR   where the new run writes

Exit status: 0 all is the same, 1 something differs or the new run failed, 2 a run can't be read.

example: python -m pipeline reproduce outputs/2026-11-21/14-46-29_lenet5_digits
"""
RUN_DIR, RESUME = "hydra.run.dir", "train.resume"
LOOKS_S = 0.2
"""Time between looks at the progress of the new run."""


@dataclass(frozen=True)
class ReproduceArguments:
    """The parsed arguments."""

    source: Path
    overrides: tuple[str, ...]
    run_dir: str | None


def main(args: Sequence[str]) -> int:
    """Run a recipe again and compare; the exit status is 0 where all is the same, else 1.

    A run that ended early is repeated as far as it went. Raises UsageError for other arguments,
    RecipeError and DataError where the run can't be read, RunError where it can't be run again.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    kept = read_record(given.source)
    name = check_tree(dict(kept.recipe)).name
    steps = last_step(kept.run_dir / METRICS)
    if steps is None:
        raise DataError(f"{kept.run_dir / METRICS}: has no step to compare with")
    run_dir = (
        run_directory.make(Path(given.run_dir))
        if given.run_dir
        else run_directory.create(f"{name}_reproduced")
    )
    _copy_lowerings(kept.run_dir, run_dir)
    status = _rerun(kept, run_dir, given.overrides, None if kept.status == "done" else steps)
    if not (run_dir / RECIPE).exists():
        _remove_unused(run_dir, named=given.run_dir is not None)
        if status != RecipeError.exit_status:
            raise RunError(f"{run_dir}: the new run ended before it began, exit status {status}")
    if status == RecipeError.exit_status:
        return status
    note_descendant(kept.run_dir, "reproduced", run_dir)
    return compare_and_report(kept, read_record(run_dir))


def _parse(args: Sequence[str]) -> ReproduceArguments:
    # Folders of sweeps may be named after the keys that vary: `lr=0.1`.
    words = [arg for arg in args if "=" not in arg or Path(arg).exists()]
    if len(words) != 1 or words[0].startswith("-"):
        raise UsageError(args, USAGE)
    if resume := [arg for arg in args if key_of(arg) == RESUME]:
        raise UsageError(
            resume, "goes on with a run, where reproduce makes a new one; leave it out"
        )
    overrides = tuple(arg for arg in args if arg not in words and key_of(arg) != RUN_DIR)
    return ReproduceArguments(Path(words[0]), overrides, value_of(args, RUN_DIR))


def _copy_lowerings(source: Path, target: Path) -> None:
    """Copy the choice of lowerings: the same bits need the same computation of convolutions."""
    if (source / LOWERINGS).is_file() and not (source / LOWERINGS).is_symlink():
        try:
            write_whole(target / LOWERINGS, read_bytes(source / LOWERINGS))
        except OSError as error:
            raise RunError(f"{error.filename}: {error.strerror}") from error
        except ValueError as error:
            raise DataError(f"{source / LOWERINGS}: {error}") from error


def _remove_unused(run_dir: Path, *, named: bool) -> None:
    """Remove the files of a run that never began; a directory that the user named stays."""
    (run_dir / LOWERINGS).unlink(missing_ok=True)
    if not named:
        with suppress(OSError):
            run_dir.rmdir()


def _rerun(kept: RunRecord, run_dir: Path, overrides: Sequence[str], steps: int | None) -> int:
    """Run the recipe in a process of its own, up to step `steps` or its end; its exit status."""
    recipe = kept.run_dir.absolute() / RECIPE
    own = [f"+recipe={recipe}", f"{RESUME}=null", f"{RUN_DIR}={quoted(str(run_dir.absolute()))}"]
    # -P: the folder comes from the run's files, and modules in it must not be imported.
    command = [sys.executable, "-P", "-m", "pipeline", *own, *overrides]
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
    """Inside, pass signals that stop this process on to `process`, which then saves its state."""
    # Ctrl-C and the end of a terminal reach both processes; `kill` reaches this one alone.
    numbers = [number for number in find_stops() if number != signal.SIGINT]
    before = {number: signal.signal(number, lambda *_: process.terminate()) for number in numbers}
    try:
        yield
    except KeyboardInterrupt:
        # The terminal has interrupted both.
        process.wait()
        raise
    except Exception:
        process.terminate()
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def compare_and_report(kept: RunRecord, repeated: RunRecord) -> int:
    """Print how the repeated run compares: 0 where steps and metrics are the same, else 1.

    Raises DataError where a log can't be read, RunError where the new run has none.
    """
    if not (repeated.run_dir / METRICS).exists():
        raise RunError(f"{repeated.run_dir}: {repeated.summary.get('reason', 'has no steps')}")
    found = compare_steps(kept.run_dir / METRICS, repeated.run_dir / METRICS)
    metrics = _metrics_that_differ(kept, repeated)
    same = found.first is None and not found.only_one and not metrics
    page = SideBySide(kept, repeated)
    page.show_steps(found)
    page.show_differences("metrics", metrics)
    if not same:
        page.show_origins()
    elif changed := _changed_keys(kept, repeated):
        page.show_text("although", f"{', '.join(changed)} differ")
    page.show_text("verdict", _verdict(same, found, kept))
    return 0 if same else 1


def _metrics_that_differ(kept: RunRecord, repeated: RunRecord) -> list[Difference] | None:
    """Metrics of the last evaluation that differ; None for a run that ended before it."""
    if kept.status != "done":
        return None
    found = compare_outcomes(kept, repeated)
    return [difference for difference in found if difference.where[0] == "metrics"]


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
