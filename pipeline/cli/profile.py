"""`python -m pipeline profile ...`: where the time of a recipe's steps goes, with a verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.train import compose_run, train_run
from pipeline.config.overrides import key_of
from pipeline.config.profile_spec import parse_profiling_variables
from pipeline.core.files.bounded_read import read_json
from pipeline.stages.record.run_directory import PROFILE

STAGES = "stages=[data,build,compile,train]"
MODE = "profile.mode"
FILE = "profile.json"
GPU_FLAG = "--xla_gpu_enable_command_buffer="


def main(overrides: Sequence[str]) -> CommandResult:
    """Run a recipe for as long as its profile takes; the facts are those of profile.json.

    Raises RecipeError for an invalid recipe, or one that can't be profiled.
    """
    started_at = time.perf_counter()
    typed = {key_of(override) for override in overrides}
    from_environment = [
        key for key in parse_profiling_variables(os.environ) if key_of(key) not in {*typed, MODE}
    ]
    keys = [f"{MODE}=only", *([] if "stages" in typed else [STAGES]), *from_environment]
    # Command buffers of a GPU hide the names of operations. On other devices the flag would only
    # change the keys of cached programs.
    if "device=gpu" in overrides and GPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAG}".strip()
    words = [*overrides, *keys]
    run = compose_run(words)
    summary = train_run(run, words, started_at)
    facts = {"run": summary.run_dir, "status": summary.status}
    if summary.status == "stopped":
        return CommandResult(facts, summary.exit_status)
    folder = run.recipe.profile.output or Path(str(summary.run_dir)) / PROFILE
    facts = {**facts, "folder": str(folder), **read_json(folder / FILE)}
    return CommandResult(facts, summary.exit_status)
