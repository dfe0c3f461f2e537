"""Start of a run, or of a sweep of runs, by the arguments of a command line and Hydra."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import hydra
import yaml
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.compose import (
    SEVERAL_VALUES,
    UNCOMPOSABLE,
    check_new_run,
    compose_and_check,
    compose_config,
    explain_several_values,
)
from pipeline.config.hydra_options import (
    HYDRA_DEFAULTS,
    allow_lazy_help,
    get_args_parser,
    resolve_recipe,
)
from pipeline.config.inspection_specs import parse_profiling_variables
from pipeline.config.overrides import (
    expand_sweeps,
    get_key,
    list_swept_keys,
    quote_value,
    require_hydra_keys,
    value_of,
)
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_file import YAML
from pipeline.core.errors import (
    RecipeError,
    RunError,
    UsageError,
    first_line,
    get_exit_status,
    printable,
)
from pipeline.core.files.paths import CONF, expand_home
from pipeline.core.host.launchers import find_place
from pipeline.core.host.signals import conclude, end_with, watch_signals
from pipeline.core.reporter import MARGIN
from pipeline.stages.record import run_directory
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.resume_command import (
    RESUME,
    SWEEP_DIR,
    make_resume_run_command,
    make_resume_sweep_command,
)

RESUME_CHANGED = "train.resume_changed"
RESUME_KEYS = (RESUME, RESUME_CHANGED)
"""Keys about resuming, which a sweep's saved command doesn't include."""
MULTIRUN = ("-m", "--multirun")
RUN_DIR = "hydra.run.dir"
MISSING_CLASS = re.compile(r"Error locating target '([\w.]+)'")
"""Hydra's message about a class that can't be imported, such as one of an absent annex."""


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of a command that trains."""

    words: Sequence[str]
    """All arguments, with those that the environment adds."""
    flags: Sequence[str]
    """Flags of Hydra."""
    typed: Sequence[str]
    """Overrides as they were typed."""
    overrides: Sequence[str]
    """Overrides for Hydra, with the registered name of a recipe file instead of its path."""


ComposedRun = tuple[Recipe, Path | None]
"""A recipe, and the directory that `hydra.run.dir` names; None: a new one under `outputs/`."""


def main(args: Sequence[str], started_at: float | None = None, *, alone: bool = False) -> int:
    """Train, as a run or a sweep, and return the exit status.

    `started_at` is the start of the command by `time.perf_counter`, in seconds; None: now. `alone`
    is whether the process runs only this command. If so, its code is the code on disk, and it may
    read programs that an earlier process compiled from this code. Raises RecipeError with every
    problem if the recipe can't be composed.
    """
    with watch_signals():
        return _train(args, started_at, alone)


def _train(args: Sequence[str], started_at: float | None, alone: bool) -> int:
    keys = {get_key(arg) for arg in args}
    if "profile.mode" not in keys:
        from_environment = parse_profiling_variables(os.environ)
        args = [*args, *(item for item in from_environment if get_key(item) not in keys)]
    parsed = _parse(args)
    flags = [arg for arg in args if arg not in parsed.overrides]
    if parsed.hydra_help or parsed.info or parsed.shell_completion:
        _run_hydra(flags, parsed.overrides, parsed.overrides, lambda config: None)
        return 0
    require_hydra_keys(args)
    if parsed.cfg == "job" and not parsed.package:
        tree = compose_and_check(parsed.overrides).model_dump(mode="json")
        print(yaml.safe_dump(tree, sort_keys=False), end="")
        return 0
    arguments = TrainArguments(args, flags, parsed.overrides, resolve_recipe(parsed.overrides))
    if parsed.multirun:
        _, status = run_sweep(arguments)
        return status
    started_at = time.perf_counter() if started_at is None else started_at
    run = _compose_run(arguments)
    if run is None:
        return 0
    return train_run(run, args, started_at, alone=alone).exit_status


def _parse(args: Sequence[str]) -> Namespace:
    """Split arguments into Hydra's flags and overrides. Raises UsageError for other flags."""
    try:
        with allow_lazy_help():
            parser = get_args_parser()
            parser.prog = "python -m pipeline"
            parser.exit_on_error = False
            parsed, unknown = parser.parse_known_intermixed_args(list(args))
    except ArgumentError as error:
        raise UsageError([error.argument_name or "flags"], error.message) from error
    if unknown:
        raise UsageError(unknown[:1], "there is no such flag; --help and --hydra-help list flags")
    return parsed


def compose_run(overrides: Sequence[str]) -> ComposedRun:
    """Compose a run without flags of Hydra. Raises RecipeError with every problem."""
    require_hydra_keys(overrides)
    run = _compose_run(TrainArguments(overrides, (), overrides, resolve_recipe(overrides)))
    assert run is not None, "without flags, Hydra composes"
    return run


def _compose_run(arguments: TrainArguments) -> ComposedRun | None:
    """Compose the run of these arguments; None if a flag makes Hydra print something instead."""
    composed = _compose(arguments.flags, arguments.typed, arguments.overrides)
    if composed is None:
        return None
    config, hydra_config = composed
    recipe = check_new_run(config, hydra_config.overrides.task)
    with _report_references():
        folder = hydra_config.run.dir
    with _report_problems(arguments.typed):
        # After the check, so that a refused recipe leaves no directory.
        Path(folder).mkdir(parents=True, exist_ok=True)
    is_named = folder != "."  # the default of conf/config.yaml
    return recipe, Path(folder) if is_named else None


def train_run(
    run: ComposedRun, words: Sequence[str], started_at: float, *, alone: bool = False
) -> Summary:
    """Run a composed recipe, and return the summary. `words` are the arguments of the command.

    It is called outside of Hydra, which would print errors itself.
    """
    from pipeline.stages.run import run as run_stages
    from pipeline.stages.runner.context import RunOptions
    from pipeline.stages.runner.programs import lower_and_compile

    recipe, run_dir = run
    name = value_of(words, "recipe") or ""
    options = RunOptions(
        run_dir=run_dir,
        recipe_folder=expand_home(Path(name)).parent if name.endswith(YAML) else None,
        started_at=started_at,
        how_to_resume=partial(make_resume_run_command, words),
        programs=partial(lower_and_compile, reuses_programs=alone),
    )
    return run_stages(recipe, options)


def run_sweep(arguments: TrainArguments) -> tuple[Path, int]:
    """Run the unfinished jobs of a sweep, in an existing directory or a new one.

    Returns the directory, and the exit status.
    """
    flags = arguments.flags
    overrides = arguments.overrides
    changed = value_of(overrides, RESUME_CHANGED)
    if changed not in (None, "refuse", "allow"):
        # It isn't a key of the jobs' recipes, which would be checked.
        raise RecipeError([f"{RESUME_CHANGED} = {changed}: must be 'refuse' or 'allow'"])
    typed = [override for override in arguments.typed if get_key(override) not in RESUME_KEYS]
    excluded = (*RESUME_KEYS, SWEEP_DIR)
    job_overrides = [override for override in overrides if get_key(override) not in excluded]
    # Imported here, as in other functions about sweeps, since a run needs none.
    from pipeline.stages.record.member_runs import find_jobs
    from pipeline.study.sweep.directory import find_failures, find_sweep, read_command

    existing = _find_directory(flags, typed, overrides)
    is_auto = value_of(overrides, "launch") in (None, "auto")
    place = find_place("auto", os.environ) if is_auto else None
    if place is not None and existing is None:
        rule = f"must be set: {place.launcher} has started {place.size} processes, which share jobs"
        raise RecipeError([f"{SWEEP_DIR} = null: {rule}"])
    recipe = value_of(overrides, "recipe") or ""
    name = f"sweep_{recipe}" if recipe.isidentifier() else "sweep"
    sweep_dir = existing or run_directory.create_run_dir(name)
    sweep_overrides = [*job_overrides, f"{SWEEP_DIR}={quote_value(str(sweep_dir))}"]
    is_shared = place is not None
    # Imported here, after the checks of the arguments: they import jax.
    from pipeline.study.sweep.jobs import Job, OnChanged

    def end() -> int:
        print("the sweep was stopped", file=sys.stderr)
        return _conclude(arguments, sweep_dir, get_exit_status("stopped"), is_shared)

    try:
        keys = list_swept_keys(job_overrides)
        on_changed: OnChanged = "allow" if changed == "allow" else "refuse"
        job = Job(keys, find_failures(sweep_dir), on_changed)
        with end_with(end):
            _run_hydra(flags, typed, sweep_overrides, job)
    except RecipeError:
        if existing is None and not find_jobs(sweep_dir):
            shutil.rmtree(sweep_dir)
        raise
    except KeyboardInterrupt:
        with conclude():
            status = end()
    else:
        status = _conclude(arguments, sweep_dir, 0, is_shared)
    if existing is None:
        command = read_command(sweep_dir)
        earlier_dir = find_sweep(command, besides=sweep_dir) if command else None
        if earlier_dir is not None:
            rule = f"{RESUME}=auto goes on with the newest"
            print(printable(f"{earlier_dir} is a sweep of the same command; {rule}"))
    return sweep_dir, status


def _conclude(arguments: TrainArguments, sweep_dir: Path, stop_status: int, is_shared: bool) -> int:
    """Write the table of a sweep, and print how to resume it. Return the exit status of the sweep,
    `stop_status` or that of its jobs."""
    from pipeline.stages.record.member_runs import find_jobs
    from pipeline.study.sweep.table import conclude_sweep

    # A signal may come before the first job.
    has_jobs = not stop_status or bool(find_jobs(sweep_dir))
    jobs_status = conclude_sweep(sweep_dir, is_shared=is_shared) if has_jobs else 0
    status = max(stop_status, jobs_status)
    if status in (RunError.exit_status, get_exit_status("stopped")):
        how_to_resume = make_resume_sweep_command(arguments.words, sweep_dir)
        print(printable(f"{'resume':<{MARGIN}} {how_to_resume}"))
    return status


def _find_directory(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str]
) -> Path | None:
    """Return the existing directory of the sweep, by `hydra.sweep.dir` or `train.resume=auto`.

    Returns None if a new directory has to be made. Raises RecipeError for several directories, a
    single run's directory, and a directory in `train.resume`.
    """
    folder = value_of(overrides, SWEEP_DIR)
    resume = value_of(overrides, RESUME)
    if not folder and resume in (None, "null"):
        return None
    if not folder and resume != "auto":
        rule = f"a sweep can go on with one of the same command: auto, or {SWEEP_DIR}=DIR"
        raise RecipeError([f"{RESUME} = {resume}: {rule}"])
    from pipeline.study.sweep.directory import find_sweep, make_command

    swept = list_swept_keys(overrides)
    if SWEEP_DIR in swept:
        raise RecipeError([f"{SWEEP_DIR} = {folder}: must be one directory; quote what has commas"])
    single_run_flags = [flag for flag in flags if flag not in MULTIRUN]
    saved_overrides = [override for override in overrides if get_key(override) not in RESUME_KEYS]
    fixed = [override for override in saved_overrides if get_key(override) not in swept]
    composed = _compose(single_run_flags, typed, fixed)
    assert composed is not None, "without flags, Hydra composes"
    _, hydra_config = composed
    with _report_references():
        if folder:
            sweep_dir = Path(hydra_config.sweep.dir)
            if (sweep_dir / run_directory.RECIPE).exists():
                rule = "holds a single run; a sweep takes another directory"
                raise RecipeError([f"{SWEEP_DIR} = {sweep_dir}: {rule}"])
            return sweep_dir
        parsed = OverridesParser.create().parse_overrides(saved_overrides)
        # A sweeper gets only overrides that aren't Hydra's.
        lines = [item.input_line for item in parsed if not item.is_hydra_override()]
        return find_sweep(make_command(hydra_config, [line for line in lines if line]))


@contextmanager
def _report_references() -> Iterator[None]:
    """Raise RecipeError if, in the block, a key of Hydra refers to a missing key."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise RecipeError([f"{error.full_key}: {first_line(error)}"]) from error


def _compose(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str]
) -> tuple[DictConfig, HydraConf] | None:
    """Return the composed config and Hydra's section; None if a flag makes Hydra print only."""
    hydra_keys = {key for key in map(get_key, overrides) if key.partition(".")[0] == "hydra"}
    if not flags and hydra_keys <= {RUN_DIR}:
        config, hydra_config = _compose_once(typed, overrides)
        if hydra_config.mode is None and not hydra_config.callbacks:
            return config, hydra_config
    results: list[tuple[DictConfig, HydraConf]] = []
    _run_hydra(flags, typed, overrides, lambda config: results.append((config, HydraConfig.get())))
    return results[0] if results else None


def _compose_once(typed: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, HydraConf]:
    """Compose as `hydra.main` does, but once: `hydra.main` composes twice, first for its mode."""
    with _report_problems(typed):
        config = compose_config(list(overrides), with_hydra=True)
        HydraConfig.instance().set_config(config)
        hydra_config = HydraConfig.get()
        with open_dict(config):
            del config["hydra"]
    return config, hydra_config


def _run_hydra(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str], task: hydra.TaskFunction
) -> None:
    """Make Hydra compose a config and call `task` with it."""
    # With this variable Hydra raises errors; otherwise it prints them and exits.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["pipeline", *flags, *overrides]
    with _report_problems(typed), allow_lazy_help():
        hydra.main(config_path=str(CONF), config_name="config", **HYDRA_DEFAULTS)(task)()


@contextmanager
def _report_problems(typed: Sequence[str]) -> Iterator[None]:
    """Raise errors of the block as RecipeError with every problem of the recipe, or as RunError if
    a directory can't be made."""
    try:
        yield
    except (*UNCOMPOSABLE, RecursionError) as error:
        for job in expand_sweeps(typed):
            compose_and_check(job)
        if first_line(error).startswith(SEVERAL_VALUES):
            sweeps = [item for item in typed if expand_sweeps([item]) != [[item]]]
            raise RecipeError(list(map(explain_several_values, sweeps))) from error
        reason = first_line(error)
        if missing := MISSING_CLASS.match(reason):
            groups = [item for item in typed if get_key(item).startswith("hydra/")]
            where = ", ".join(map(printable, groups)) or "hydra"
            reason = f"{where}: needs {missing[1]}, which this installation lacks"
        raise RecipeError([reason]) from error
    except OSError as error:
        if error.filename is None:
            raise RunError(str(error)) from error
        from pipeline.stages.record.run_directory import explain_unmade

        raise RunError(explain_unmade(Path(error.filename), error)) from error
