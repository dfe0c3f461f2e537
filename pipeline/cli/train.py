"""From command-line arguments to one run or a sweep of runs, through Hydra."""

from __future__ import annotations

import os
import shutil
import sys
import time
from argparse import ArgumentError, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
import yaml
from hydra import compose, initialize_config_dir
from hydra.conf import HydraConf
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, open_dict
from omegaconf.errors import OmegaConfBaseException

from pipeline.config.chosen import resolve_recipe
from pipeline.config.compose import UNCOMPOSABLE, check, compose_and_check
from pipeline.config.hydra_keys import require_hydra_keys
from pipeline.config.hydra_versions import HYDRA_DEFAULTS, get_args_parser, lazy_help
from pipeline.config.overrides import (
    expand_sweeps,
    key_of,
    quoted,
    swept_keys,
    value_of,
)
from pipeline.config.profile_spec import profiling_overrides
from pipeline.core.errors import (
    RecipeError,
    RunError,
    UsageError,
    exit_status_of,
    first_line,
    printable,
)
from pipeline.core.files.package_paths import CONF
from pipeline.core.reporter import MARGIN
from pipeline.stages.record import run_directory
from pipeline.stages.runner.resume_command import (
    RESUME,
    SWEEP_DIR,
    resume_run_command,
    resume_sweep_command,
)
from pipeline.study.sweep.command import command_of, find_sweep, read_command
from pipeline.study.sweep.directory import find_failures, find_jobs
from pipeline.study.sweep.table import conclude

if TYPE_CHECKING:
    from pipeline.study.sweep.jobs import OnChanged

RESUME_CHANGED = "train.resume_changed"
OF_ONE_COMMAND = (RESUME, RESUME_CHANGED)
"""Keys of one command about resuming, which are no part of the sweep's own command."""
MULTIRUN = ("-m", "--multirun")
RUN_DIR = "hydra.run.dir"


@dataclass(frozen=True)
class TrainArguments:
    """The arguments of a command that trains."""

    words: Sequence[str]
    """All of them, with those that the environment adds."""
    flags: Sequence[str]
    """Hydra's flags."""
    typed: Sequence[str]
    """The overrides."""
    overrides: Sequence[str]
    """The overrides that Hydra composes: a recipe file is registered under a name."""


def main(args: Sequence[str], started_at: float | None = None, *, alone: bool = False) -> int:
    """Run the run or sweep that the arguments describe and return the exit status.

    `started_at` is when the command began, by `time.perf_counter`, in seconds; now unless it is
    given. `alone` for a process that does nothing else, so that its code is what lies on disk:
    compiled programs are found by it. Raises RecipeError with every problem when the recipe can't
    be composed.
    """
    args = [*args, *_profiling(args)]
    parsed = _parse(args)
    flags = [arg for arg in args if arg not in parsed.overrides]
    if parsed.hydra_help or parsed.info or parsed.shell_completion:
        _hydra(flags, parsed.overrides, parsed.overrides, lambda config: None)
        return 0
    require_hydra_keys(args)
    if parsed.cfg == "job" and not parsed.package:
        return _show(parsed.overrides)
    arguments = TrainArguments(args, flags, parsed.overrides, resolve_recipe(parsed.overrides))
    if parsed.multirun:
        return _sweep(arguments)
    started_at = time.perf_counter() if started_at is None else started_at
    return _single(arguments, started_at, alone=alone)


def _parse(args: Sequence[str]) -> Namespace:
    """Split arguments into Hydra's flags and overrides. Raises UsageError for other flags."""
    try:
        with lazy_help():
            parser = get_args_parser()
            parser.prog = "python -m pipeline"
            parser.exit_on_error = False
            parsed, unknown = parser.parse_known_intermixed_args(list(args))
    except ArgumentError as error:
        raise UsageError([error.argument_name or "flags"], error.message) from error
    if unknown:
        raise UsageError(unknown[:1], "there is no such flag; --help and --hydra-help list flags")
    return parsed


def _profiling(args: Sequence[str]) -> list[str]:
    """Return the overrides of PROFILING_MODE; keys of the command line go before them."""
    given = set(map(key_of, args))
    if "profile.mode" in given:
        return []
    return [one for one in profiling_overrides(os.environ) if key_of(one) not in given]


def _show(overrides: Sequence[str]) -> int:
    """Print the resolved recipe."""
    tree = compose_and_check(overrides).model_dump(mode="json")
    print(yaml.safe_dump(tree, sort_keys=False), end="")
    return 0


def _single(arguments: TrainArguments, started_at: float, *, alone: bool) -> int:
    """Run the recipe that Hydra composes, outside of Hydra, which prints the errors it catches."""
    composed = _compose(arguments.flags, arguments.typed, arguments.overrides)
    if composed is None:
        return 0
    config, hydra_config = composed
    recipe = check(config, hydra_config.overrides.task)
    with _resolved():
        folder = hydra_config.run.dir
    from pipeline.inspect.dumps.run_inspection import RunInspection
    from pipeline.stages.run import lower_and_compile, run
    from pipeline.stages.runner.context import RunOptions

    options = RunOptions(
        run_dir=None if folder == "." else Path(folder),
        started_at=started_at,
        how_to_resume=partial(resume_run_command, arguments.words),
        programs=partial(lower_and_compile, keeps=alone),
        inspection=RunInspection(),
    )
    return run(recipe, options).exit_status


def _sweep(arguments: TrainArguments) -> int:
    """Run the unfinished jobs of a sweep, in the directory that is named, found or created."""
    flags, overrides = arguments.flags, arguments.overrides
    on_changed = _on_changed(overrides)
    typed = [override for override in arguments.typed if key_of(override) not in OF_ONE_COMMAND]
    excluded = (*OF_ONE_COMMAND, SWEEP_DIR)
    own = [override for override in overrides if key_of(override) not in excluded]
    known = _known_directory(flags, typed, overrides)
    recipe = value_of(overrides, "recipe") or ""
    name = f"sweep_{recipe}" if recipe.isidentifier() else "sweep"
    sweep_dir = known or run_directory.create(name)
    placed = [*own, f"{SWEEP_DIR}={quoted(str(sweep_dir))}"]
    stopped = 0
    # A recipe that is refused would wait for jax to be imported.
    from pipeline.inspect.dumps.run_inspection import RunInspection
    from pipeline.study.sweep.jobs import Job

    try:
        job = Job(swept_keys(own), find_failures(sweep_dir), on_changed, RunInspection())
        _hydra(flags, typed, placed, job)
    except RecipeError:
        if known is None and not find_jobs(sweep_dir):
            shutil.rmtree(sweep_dir)
        raise
    except KeyboardInterrupt as interruption:
        print("the sweep was stopped", file=sys.stderr)
        stopped = exit_status_of(interruption)
    status = max(stopped, conclude(sweep_dir))
    if stopped or status == RunError.exit_status:
        print(printable(f"{'resume':<{MARGIN}} {resume_sweep_command(arguments.words, sweep_dir)}"))
    if known is None:
        _report_equal_sweep(sweep_dir)
    return status


def _on_changed(overrides: Sequence[str]) -> OnChanged:
    """Whether to refuse or allow resuming jobs whose data have changed.

    Raises RecipeError for any other value: no job would check it.
    """
    match value_of(overrides, RESUME_CHANGED):
        case None | "refuse":
            return "refuse"
        case "allow":
            return "allow"
        case other:
            raise RecipeError([f"{RESUME_CHANGED} = {other}: must be 'refuse' or 'allow'"])


def _report_equal_sweep(sweep_dir: Path) -> None:
    """Print the newest earlier sweep of the same command, which could be resumed instead."""
    command = read_command(sweep_dir)
    earlier = command and find_sweep(command, besides=sweep_dir)
    if earlier:
        name = printable(str(earlier))
        print(f"{name} is a sweep of the same command; {RESUME}=auto goes on with the newest")


def _known_directory(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str]
) -> Path | None:
    """The directory given for a sweep, or that of the sweep to resume; None for a new one.

    Raises RecipeError where several are given, or `train.resume` names a single run.
    """
    given, resume = value_of(overrides, SWEEP_DIR), value_of(overrides, RESUME)
    if not given and resume in (None, "null"):
        return None
    if not given and resume != "auto":
        rule = f"a sweep can go on with one of the same command: auto, or {SWEEP_DIR}=DIR"
        raise RecipeError([f"{RESUME} = {resume}: {rule}"])
    swept = swept_keys(overrides)
    if SWEEP_DIR in swept:
        raise RecipeError([f"{SWEEP_DIR} = {given}: must be one directory; quote what has commas"])
    single = [flag for flag in flags if flag not in MULTIRUN]
    own = [override for override in overrides if key_of(override) not in OF_ONE_COMMAND]
    fixed = [override for override in own if key_of(override) not in swept]
    composed = _compose(single, typed, fixed)
    assert composed is not None, "without flags, Hydra composes"
    with _resolved():
        if given:
            return Path(composed[1].sweep.dir)
        return find_sweep(command_of(composed[1], _of_recipe(own)))


def _of_recipe(overrides: Sequence[str]) -> list[str]:
    """The overrides that Hydra passes to a sweeper: all except those of its own keys."""
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    return [one.input_line for one in parsed if one.input_line and not one.is_hydra_override()]


@contextmanager
def _resolved() -> Iterator[None]:
    """Raise RecipeError where one of Hydra's own keys refers to a key that is missing."""
    try:
        yield
    except OmegaConfBaseException as error:
        raise RecipeError([f"{error.full_key}: {first_line(error)}"]) from error


def _compose(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str]
) -> tuple[DictConfig, HydraConf] | None:
    """The composed config and Hydra's own section; None where a flag asks Hydra for output."""
    of_hydra = {key for key in map(key_of, overrides) if key.partition(".")[0] == "hydra"}
    if not flags and of_hydra <= {RUN_DIR}:
        config, own = _compose_once(typed, overrides)
        if own.mode is None and not own.callbacks:
            return config, own
    composed: list[tuple[DictConfig, HydraConf]] = []

    def keep(config: DictConfig) -> None:
        composed.append((config, HydraConfig.get()))

    _hydra(flags, typed, overrides, keep)
    return composed[0] if composed else None


def _compose_once(typed: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, HydraConf]:
    """Compose as `hydra.main` does, which composes a second time to find out what it is to do."""
    with _reported(typed):
        GlobalHydra.instance().clear()
        with initialize_config_dir(str(CONF), job_name="pipeline", **HYDRA_DEFAULTS):
            config = compose("config", list(overrides), return_hydra_config=True)
        HydraConfig.instance().set_config(config)
        of_hydra = HydraConfig.get()
        with open_dict(config):
            del config["hydra"]
        Path(of_hydra.run.dir).mkdir(parents=True, exist_ok=True)
    return config, of_hydra


def _hydra(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str], task: hydra.TaskFunction
) -> None:
    """Have Hydra compose and call `task`."""
    # Without this variable Hydra prints errors and exits; with it, it raises.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["pipeline", *flags, *overrides]
    with _reported(typed), lazy_help():
        hydra.main(config_path=str(CONF), config_name="config", **HYDRA_DEFAULTS)(task)()


@contextmanager
def _reported(typed: Sequence[str]) -> Iterator[None]:
    """Report every problem of overrides that can't be composed within, and of the run directory."""
    try:
        yield
    except (*UNCOMPOSABLE, RecursionError) as error:
        for job in expand_sweeps(typed):
            compose_and_check(job)
        raise RecipeError([first_line(error)]) from error
    except OSError as error:
        if error.filename is None:
            raise RunError(str(error)) from error
        message = f"{error.filename}: can't make the run directory: {error.strerror}"
        raise RunError(message) from error
