"""Planning of a sweep's jobs from its command, and their execution until all are finished.

Jobs are entered into its directory, and executed by this process or by others.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, OverrideType
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from pipeline.config.compose import check
from pipeline.config.hydra_options import (
    BasicLauncher,
    BasicSweeper,
    apply_overrides,
    set_override_dirname,
)
from pipeline.config.overrides import quote_value, sets_key
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RecipeError, RunError, printable, printable_lines
from pipeline.core.files.atomic_write import LOCK
from pipeline.core.files.trusted_files import require_real, require_real_folder, require_real_trees
from pipeline.core.files.value_text import join_first
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.run_directory import RECIPE, require_unused
from pipeline.stages.runner.resumed_run import list_changed_keys
from pipeline.study.sweep.directory import (
    BEATS,
    JOURNAL,
    JOURNAL_LOCK,
    Command,
    format_changed,
    hold_planning_lock,
    is_finished,
    is_held,
    read_command,
    read_overrides,
    read_values,
    write_command,
    write_overrides,
)
from pipeline.study.sweep.jobs import ESTIMATE_PRUNER, share_processors

POLL_S = 0.5
"""Seconds between two checks whether other processes have finished their jobs."""
MAX_FUTILE_STARTS = 3
"""Successive starts without a finished job after which the launcher counts as broken."""


@dataclass(frozen=True)
class PlannedJob:
    """A job of a sweep: its number, directory and overrides, and the keys that distinguish it."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    changed: Mapping[str, Any]
    recipe: Recipe | None
    """None if the overrides are invalid, which the job reports, or if the recipe isn't needed."""


def compose_job(sweeper: BasicSweeper, overrides: Sequence[str]) -> DictConfig:
    """Compose a sweep's configuration with overrides.

    Raises Hydra's errors for overrides that can't be composed.
    """
    assert sweeper.hydra_context is not None
    assert sweeper.config is not None
    loader = sweeper.hydra_context.config_loader
    return loader.load_sweep_config(sweeper.config, list(overrides))


def plan_job(
    sweeper: BasicSweeper, number: int, overrides: Sequence[str], swept: Sequence[str]
) -> PlannedJob:
    """Plan job `number` of a sweep; the keys `swept` distinguish it from other jobs.

    Raises Hydra's errors for overrides that can't be composed.
    """
    config = compose_job(sweeper, overrides)
    folder = _number_job(config, number)
    recipe = _check_recipe(config, overrides)
    return PlannedJob(number, folder, tuple(overrides), read_values(overrides, swept), recipe)


def plan_jobs(
    sweeper: BasicSweeper,
    combinations: Sequence[Sequence[str]],
    swept: Sequence[str],
    *,
    with_recipes: bool,
) -> list[PlannedJob]:
    """Plan the jobs of a grid: the result of `plan_job` for each combination of overrides.

    Composing is slow, so it is done once for jobs that differ only in values of keys. A job's
    recipe is checked only if its directory has a recipe to compare, or `with_recipes` is set.
    """
    composed: dict[tuple[str, ...], DictConfig] = {}
    jobs = []
    for number, overrides in enumerate(combinations):
        parsed = OverridesParser.create().parse_overrides(list(overrides))
        single_values = [item for item in parsed if _sets_one_value(item, parsed, swept)]
        fixed = tuple(str(item.input_line) for item in parsed if item not in single_values)
        # Jobs with the same fixed overrides share a configuration: each sets all other keys again.
        config = composed.get(fixed)
        if config is None:
            config = composed[fixed] = compose_job(sweeper, overrides)
        else:
            apply_overrides(single_values, config)
            _record_overrides(config, parsed)
        folder = _number_job(config, number)
        needs_recipe = with_recipes or (folder / RECIPE).exists()
        recipe = _check_recipe(config, overrides) if needs_recipe else None
        changed = read_values(overrides, swept)
        jobs.append(PlannedJob(number, folder, tuple(overrides), changed, recipe))
    return jobs


def _sets_one_value(
    override: Override, overrides: Sequence[Override], swept: Sequence[str]
) -> bool:
    """Return whether an override sets one value of a swept key, and no other override sets this key
    or a key above or below it."""
    key = override.key_or_group
    value = override.value()
    if key not in swept or override.type is not OverrideType.CHANGE or override.package:
        return False
    if not isinstance(value, str | int | float | None) or not sets_key(str(override.input_line)):
        return False
    keys = [other.key_or_group for other in overrides if other is not override]
    return not any(
        f"{other}.".startswith(f"{key}.") or f"{key}.".startswith(f"{other}.") for other in keys
    )


def _record_overrides(config: DictConfig, overrides: Sequence[Override]) -> None:
    """Write the overrides into the section `hydra` of a configuration, as composing does."""
    task_overrides = [override for override in overrides if not override.is_hydra_override()]
    with read_write(config), open_dict(config.hydra):
        config.hydra.overrides.task = [override.input_line for override in task_overrides]
        set_override_dirname(config.hydra.job, task_overrides)


def _number_job(config: DictConfig, number: int) -> Path:
    """Set the number of a job in its configuration, and return the job's directory."""
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    return Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)


def _check_recipe(config: DictConfig, overrides: Sequence[str]) -> Recipe | None:
    """Return the recipe of a job; None if it isn't valid."""
    task = copy.deepcopy(config)
    with read_write(task), open_dict(task):
        del task["hydra"]
    earlier = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        return check(task, overrides)
    except RecipeError:
        return None
    finally:
        HydraConfig.instance().cfg = earlier
        # Hydra makes its section read-only, but later jobs of a grid change it.
        OmegaConf.set_readonly(config.hydra, False)


def enter_jobs(
    sweep_dir: Path, jobs: Sequence[PlannedJob], command: Command, *, is_whole_grid: bool = True
) -> None:
    """Enter new jobs and the command into the sweep's directory.

    With `is_whole_grid`, `jobs` are all jobs of a grid, and may be more than before. Other sweeps
    enter some jobs at a time, and their command must be the same. Raises RunError if the
    directory has another sweep, RecipeError if two jobs share a directory or one is outside of the
    sweep's, and DataError if existing files can't be read, are links or don't belong to a sweep.
    """
    _require_separate_folders(sweep_dir, jobs)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    require_real(sweep_dir, (LOCK, JOURNAL, JOURNAL_LOCK), (JOURNAL,))
    require_real_trees(sweep_dir, (BEATS,))
    with hold_planning_lock(sweep_dir):
        _require_same_sweep(sweep_dir, jobs, command, is_whole_grid=is_whole_grid)
        new = [job for job in jobs if read_overrides(job.folder) is None]
        for job in jobs:
            require_real_folder(job.folder)
        for job in new:
            if job.folder.exists():
                require_unused(job.folder)
        write_command(sweep_dir, command)
        for job in new:
            job.folder.mkdir(exist_ok=True)
            write_overrides(job.folder, job.changed)


def _require_separate_folders(sweep_dir: Path, jobs: Sequence[PlannedJob]) -> None:
    counts = Counter(job.folder for job in jobs)
    wrong = [
        folder
        for folder, count in counts.items()
        if count > 1 or folder.parent != sweep_dir or folder.name == ".."
    ]
    if wrong:
        name = os.path.relpath(wrong[0], sweep_dir)
        rule = "must be another folder for each job, directly in the sweep's directory"
        raise RecipeError([f"hydra.sweep.subdir = {name}: {rule}"])


def _require_same_sweep(
    sweep_dir: Path, jobs: Sequence[PlannedJob], command: Command, *, is_whole_grid: bool
) -> None:
    """Raise RunError if the directory has another sweep. A whole grid may have further jobs."""
    problems = []
    recorded = read_command(sweep_dir)
    if recorded is not None:
        name = recorded.sweeper.name
        earlier = recorded.arguments
        current = command.redact().arguments
        if name not in (None, command.sweeper.name):
            problems.append(
                f"the directory has hydra/sweeper={name}, the command {command.sweeper.name}"
            )
        pruners = [_describe_pruner(each) for each in (recorded, command.redact())]
        if is_whole_grid and len(set(pruners)) > 1:
            names = f"{pruners[0]}, the command {pruners[1]}"
            problems.append(f"the directory has hydra/sweeper/pruner={names}")
        if not is_whole_grid:
            problems += [
                f"only the directory has {item}" for item in earlier if item not in current
            ]
            problems += [f"only the command has {item}" for item in current if item not in earlier]
    problems += [problem for job in jobs for problem in _list_differences(job)]
    planned = {job.folder.name for job in jobs}
    existing = find_jobs(sweep_dir) if is_whole_grid else []
    for folder in existing:
        if folder.name not in planned:
            keys = format_changed(read_overrides(folder) or {}) or "nothing"
            problems.append(f"only the directory has job {folder.name} ({keys})")
    if problems:
        first = join_first(problems, 3, "; ", "; and ")
        raise RunError(f"{sweep_dir}: has another sweep: {first}; name another directory")


def _describe_pruner(command: Command) -> str:
    """Return the pruner of a grid with its settings; none without one."""
    section = (command.sweeper.model_extra or {}).get("pruner")
    if not isinstance(section, dict):
        return "none"
    settings = {key: value for key, value in section.items() if key != "_target_"}
    name = "estimate" if section.get("_target_") == ESTIMATE_PRUNER else section.get("_target_")
    return f"{name} ({format_changed(settings)})" if settings else str(name)


def _list_differences(job: PlannedJob) -> list[str]:
    """Return a line for each difference of a job from the job in its directory."""
    recorded = read_overrides(job.folder)
    if recorded is not None and recorded != job.changed:
        earlier = format_changed(recorded) or "nothing"
        current = format_changed(job.changed) or "nothing"
        return [f"its job {job.folder.name} has {earlier}, this one's {current}"]
    if job.recipe is None or not (job.folder / RECIPE).exists():
        return []
    lines = list_changed_keys(job.recipe, job.folder)
    # After the semicolon is advice for a run to resume.
    return [f"job {job.folder.name}: {line.partition(';')[0]}" for line in lines]


Launch = Callable[[Sequence[PlannedJob]], Sequence[JobReturn]]
"""Function that starts jobs, and returns when they have ended."""


def run_all(jobs: Sequence[PlannedJob], failures: Mapping[str, int], launch: Launch) -> None:
    """Run jobs until all are finished, by this process or by others.

    Jobs of dead processes are started again. Raises RunError if the launcher seems broken, since
    repeated starts finish no job, and the PipelineError of a launch, for example of a full disk.
    """
    futile_starts = 0
    is_waiting = False
    while unfinished := _find_unfinished(jobs, failures):
        free = [job for job in unfinished if not is_held(job.folder)]
        if not free:
            if not is_waiting:
                names = _join_names(unfinished)
                print(f"\nwaiting for other processes, which run jobs {names}", flush=True)
            is_waiting = True
            time.sleep(POLL_S)
            continue
        is_waiting = False
        reason = _try_launch(launch, free)
        lost = [job for job in _find_unfinished(free, failures) if not is_held(job.folder)]
        futile_starts = futile_starts + 1 if len(lost) == len(free) else 0
        if futile_starts == MAX_FUTILE_STARTS:
            ended = f"started {MAX_FUTILE_STARTS} times, and ended each time {reason}"
            raise RunError(f"jobs {_join_names(lost)}: {ended}")


def _find_unfinished(jobs: Sequence[PlannedJob], failures: Mapping[str, int]) -> list[PlannedJob]:
    return [job for job in jobs if not is_finished(job.folder, failures)]


def _join_names(jobs: Sequence[PlannedJob]) -> str:
    return printable(", ".join(job.folder.name for job in jobs))


def _try_launch(launch: Launch, jobs: Sequence[PlannedJob]) -> str:
    """Launch jobs, whose processes may be killed, and return how the launch ended, as text.

    Raises only a PipelineError of the launch.
    """
    try:
        for job in launch(jobs):
            if job.status == JobStatus.FAILED:
                # Reading the value raises the job's error, after Hydra has printed its overrides.
                with redirect_stderr(StringIO()):
                    job.return_value  # noqa: B018
    except PipelineError:
        raise
    except Exception as error:
        reason = f"with {type(error).__name__}: {error}".splitlines()[0]
        print(printable_lines(f"warning: a launch ended {reason}"), file=sys.stderr)
        return reason
    return "without an error"


def launch_jobs(sweeper: BasicSweeper, jobs: Sequence[PlannedJob]) -> list[JobReturn]:
    """Start jobs by the sweeper's launcher, at most `max_batch_size` at once, and wait for them.

    Hydra's basic launcher gets one job at a time, so that each has its number.
    """
    launcher = sweeper.launcher
    assert launcher is not None
    size = 1 if isinstance(launcher, BasicLauncher) else sweeper.max_batch_size or len(jobs)
    config = getattr(launcher, "config", None)
    settings: Mapping[str, Any] = {} if config is None else config.hydra.launcher
    returns: list[JobReturn] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        overrides = [
            [*job.overrides, f"hydra.sweep.subdir={quote_value(job.folder.name)}"] for job in batch
        ]
        with share_processors(settings, len(batch)):
            returns += launcher.launch(overrides, initial_job_idx=batch[0].number)
    return returns
