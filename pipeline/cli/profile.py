"""`python -m pipeline profile ...`: where the time of a recipe's steps goes, with a verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.train import compose_run, train_run
from pipeline.config.inspection_specs import parse_profiling_variables
from pipeline.config.overrides import get_key
from pipeline.core.errors import DataError, RunError, UsageError, printable_lines
from pipeline.core.files.bounded_read import read_json
from pipeline.stages.launch.join import add_xla_flag
from pipeline.stages.record.run_directory import LOG, PROFILE

STAGES = "stages=[data,build,compile,train]"
FORK_STAGES = "stages=[data,build,compile,train,checkpoint]"
MODE = "profile.mode"
FILE = "profile.json"
LEAST_LEFT = 60
MOST_LEFT = 200
"""Steps of a done run that are trained again for its profile."""
GPU_FLAG = "--xla_gpu_enable_command_buffer="


def main(overrides: Sequence[str]) -> CommandResult:
    """Run the steps of a recipe that are profiled; the facts include profile.json's.

    If `overrides` is the path of a run, `parse_run` is called, and `profile_steps` if it ends in
    @N. Raises RecipeError for an invalid recipe, or one that can't be profiled.
    """
    if overrides and "=" not in overrides[0] and overrides[0][:1] not in ("+", "~"):
        step = overrides[0].rpartition("@")[2]
        return (profile_steps if step.isdecimal() else parse_run)(overrides)
    started_at = time.perf_counter()
    typed = {get_key(override) for override in overrides}
    settings = [f"{MODE}=only"]
    if "stages" not in typed:
        settings.append(STAGES)
    variables = parse_profiling_variables(os.environ)
    settings += [item for item in variables if get_key(item) not in {*typed, MODE}]
    # Command buffers of a GPU hide the names of operations. On other devices the flag would only
    # change the keys of cached programs.
    if "device=gpu" in overrides and GPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
        add_xla_flag(GPU_FLAG)
    words = [*overrides, *settings]
    run = compose_run(words)
    summary = train_run(run, words, started_at)
    recipe, _ = run
    facts = {"run": summary.run_dir, "status": summary.status}
    if summary.status == "stopped":
        return CommandResult(facts, summary.exit_status)
    folder = recipe.profile.output or Path(str(summary.run_dir)) / PROFILE
    facts = {**facts, "folder": str(folder), **read_json(folder / FILE)}
    return CommandResult(facts, summary.exit_status)


def profile_steps(arguments: Sequence[str]) -> CommandResult:
    """Profile the steps of a run after a step, in a fork, whose state there is the run's.

    `arguments` are RUN_DIR@N and keys. Raises the errors of `fork`, and DataError if the run has
    too few steps after N.
    """
    from pipeline.cli.runs.fork import main as fork
    from pipeline.cli.runs.fork import split_place
    from pipeline.inspect.replay import find_last_step

    place = Path(arguments[0])
    run_dir, step_text = split_place(place)
    step = int(step_text)
    last = find_last_step(run_dir)
    if last < LEAST_LEFT:
        raise DataError(f"{run_dir}: has {last} steps; {LEAST_LEFT} after a step are traced")
    if last - step < LEAST_LEFT:
        rule = f"must be from 0 to {last - LEAST_LEFT}, {LEAST_LEFT} before the last step"
        raise DataError(f"{run_dir}: step {step}: {rule}, for steps that are traced")
    end = min(step + MOST_LEFT, last)
    keys = [*arguments[1:], f"{MODE}=on", f"train.end_step={end}", FORK_STAGES]
    result = fork(place, keys)
    folder = Path(str(result.facts["fork"])) / PROFILE
    if not (folder / FILE).is_file():
        raise RunError(f"{folder.parent}: has no profile; {LOG} says why")
    facts = {**result.facts, "folder": str(folder), **read_json(folder / FILE)}
    return CommandResult(facts, result.exit_status)


def parse_run(arguments: Sequence[str]) -> CommandResult:
    """Write the files of a profile again, from the recorded trace of a run.

    Raises UsageError for more than one argument, DataError for a run without a recorded trace.
    """
    path = Path(arguments[0])
    if len(arguments) > 1:
        rule = f"must be left out; {path} is parsed as it was recorded"
        raise UsageError(arguments[1:], rule)
    # Imported here: the other use of the command composes a recipe before it imports jax.
    from pipeline.core.files.atomic_write import convert_write_errors
    from pipeline.inspect.profiler.profile_files import find_profile, read_report, write_profile

    folder = find_profile(path)
    report = read_report(folder)
    with convert_write_errors(folder):
        write_profile(report, folder)
    print(printable_lines(str(report)))
    return CommandResult({"folder": str(folder), **read_json(folder / FILE)})
