"""`python -m pipeline profile ...`: where the time of a recipe's steps goes, with a verdict."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence

from pipeline.cli import train
from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.overrides import key_of
from pipeline.config.profile_spec import profiling_overrides
from pipeline.core.errors import UsageError

STAGES = "stages=[data,build,compile,train]"
MODE = "profile.mode"
GPU_FLAG = "--xla_gpu_enable_command_buffer="

HELP = """usage: python -m pipeline profile [+recipe=NAME] [KEY=VALUE ...]

Train as long as it takes to trace 20 to 200 steps inside of a sink, and say where their time goes:
by phase, layer and operator, with the iteration trace, FLOP and bytes against measured peaks,
memory, the host's share, and one line of verdict with the change that would help. The run directory
gets profile/ with profile.json, table.txt, trace.json (for Perfetto) and picture.svg. With
device=ascend910 the modelled step of that device stands beside the measured one of the host.

  +recipe=NAME          the recipe, lenet5_digits unless it is given
  KEY=VALUE             keys and parts of the recipe, as for a run
  profile.start=N       trace after N steps; else once the run is warm
  profile.steps=N       trace N steps, 20 to 200; else 60 or fewer
  profile.output=DIR    write into another folder

A whole run is profiled by profile.mode=on, or PROFILING_MODE=true and PROFILING_OPTIONS.

example: python -m pipeline profile +recipe=lenet5_digits
"""


def main(args: Sequence[str]) -> int:
    """Run a recipe for as long as its profile takes; return the exit status.

    Raises UsageError for a flag, RecipeError for an invalid recipe, or one that can't be profiled.
    """
    started_at = time.perf_counter()
    if asks_for_help(args):
        return show_usage(HELP)
    flags = [arg for arg in args if arg.startswith("-")]
    if flags:
        raise UsageError(flags[:1], "profile takes KEY=VALUE of one recipe, no flags")
    given = {key_of(arg) for arg in args}
    own = [arg for arg in profiling_overrides(os.environ) if key_of(arg) not in {*given, MODE}]
    keys = [f"{MODE}=only", *([] if "stages" in given else [STAGES]), *own]
    # Command buffers of a GPU take the names of operations away. Elsewhere the flag would only make
    # another key of every cached program.
    if "device=gpu" in args and GPU_FLAG not in os.environ.get("XLA_FLAGS", ""):
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {GPU_FLAG}".strip()
    return train.main([*args, *keys], started_at)
