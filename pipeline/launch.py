"""From command-line arguments to one run or a sweep of runs, through Hydra."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from pipeline import run_directory
from pipeline.config.compose import (
    UNCOMPOSABLE,
    check,
    diagnose,
    expand_sweeps,
    key_of,
    swept_keys,
    value_of,
    with_recipe,
)
from pipeline.errors import RecipeError, RunError, first_line
from pipeline.shipped import CONF
from pipeline.sweep.directory import find_failures, find_jobs, find_sweep
from pipeline.sweep.jobs import Job
from pipeline.sweep.table import conclude

RESUME, SWEEP_DIR = "train.resume", "hydra.sweep.dir"


def launch(args: Sequence[str], begun: float | None = None) -> int:
    """Run what the arguments describe and return the exit status.

    `begun` is when the command began, by `time.perf_counter`; now unless it is given. Raises
    RecipeError with every problem when the recipe can't be composed.
    """
    parsed = get_args_parser().parse_intermixed_args(list(args))
    flags = [arg for arg in args if arg not in parsed.overrides]
    if parsed.hydra_help or parsed.info or parsed.shell_completion:
        _hydra(flags, parsed.overrides, parsed.overrides, lambda config: None)
        return 0
    if parsed.cfg == "job" and not parsed.package:
        return _show(parsed.overrides)
    if parsed.multirun:
        return _sweep(flags, parsed.overrides)
    return _single(flags, parsed.overrides, begun)


def _show(overrides: Sequence[str]) -> int:
    """Print the recipe as it would be run."""
    tree = diagnose(overrides).model_dump(mode="json")
    print(yaml.safe_dump(tree, sort_keys=False), end="")
    return 0


def _single(flags: Sequence[str], typed: Sequence[str], begun: float | None) -> int:
    """Run once the recipe that Hydra composes, outside its hands: it prints what it catches."""
    composed: list[tuple[DictConfig, HydraConf]] = []

    def keep(config: DictConfig) -> None:
        composed.append((config, HydraConfig.get()))

    _hydra(flags, typed, with_recipe(typed), keep)
    if not composed:
        return 0
    config, hydra_config = composed[0]
    recipe = check(config, hydra_config.overrides.task)
    from pipeline.job import run

    asked = hydra_config.run.dir
    summary = run(recipe, None if asked == "." else Path(asked), begun=begun)
    return 0 if summary.status == "done" else 1


def _sweep(flags: Sequence[str], typed: Sequence[str]) -> int:
    """Do what is left to do of a sweep, in the directory that is named, found or made for it."""
    overrides = with_recipe(typed)
    asked = [override for override in overrides if key_of(override) != RESUME]
    known = value_of(overrides, SWEEP_DIR) or _to_continue(asked, value_of(overrides, RESUME))
    recipe = value_of(overrides, "recipe") or ""
    name = f"sweep_{recipe}" if recipe.isidentifier() else "sweep"
    sweep_dir = run_directory.create(name) if known is None else Path(known)
    placed = [*asked, f"{SWEEP_DIR}='{sweep_dir}'"]
    stopped = 0
    try:
        _hydra(flags, typed, placed, Job(swept_keys(asked), find_failures(sweep_dir)))
    except RecipeError:
        if known is None and not find_jobs(sweep_dir):
            shutil.rmtree(sweep_dir)
        raise
    except KeyboardInterrupt:
        print("the sweep was stopped", file=sys.stderr)
        stopped = 1
    return max(stopped, conclude(sweep_dir))


def _to_continue(asked: Sequence[str], resume: str | None) -> Path | None:
    """The sweep that `train.resume` means. Raises RecipeError where that is a single run."""
    if resume in (None, "null"):
        return None
    if resume != "auto":
        rule = f"a sweep can go on with one of the same command: auto, or {SWEEP_DIR}=DIR"
        raise RecipeError([f"{RESUME} = {resume}: {rule}"])
    return find_sweep([override for override in asked if not key_of(override).startswith("hydra")])


def _hydra(
    flags: Sequence[str], typed: Sequence[str], overrides: Sequence[str], task: hydra.TaskFunction
) -> None:
    """Have Hydra compose and call; what it can't compose is diagnosed in full, as it was typed."""
    # Hydra reports errors itself and exits, unless this is set: then it raises.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    sys.argv = ["pipeline", *flags, *overrides]
    try:
        hydra.main(config_path=str(CONF), config_name="config", version_base="1.3")(task)()
    except (*UNCOMPOSABLE, RecursionError) as error:
        for job in expand_sweeps(typed):
            diagnose(job)
        raise RecipeError([first_line(error)]) from error
    except OSError as error:
        if error.filename is None:
            raise RunError(str(error)) from error
        message = f"{error.filename}: can't make the run directory: {error.strerror}"
        raise RunError(message) from error
