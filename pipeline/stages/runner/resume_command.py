"""The command that goes on with a run or a sweep that ended early, for a shell or for Python.

A password is `***` in it, to be typed again.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config.overrides import hide_secret_values, key_of, quote_value
from pipeline.core.plugins.loading import take_flags, to_flags

RESUME = "train.resume"
RESTORE = "checkpoint.restore"
RUN_DIR = "hydra.run.dir"
SWEEP_DIR = "hydra.sweep.dir"
_PLAIN = re.compile(r"[\w.-]*(/[\w.-]+)+", re.ASCII)
"""A path that Hydra reads as it stands, and as nothing but a text."""

HowToResume = Callable[[Path, Path | None], str | None]
"""Returns how to resume a run in a directory, which started from weights or from None; None if
another process prints it."""


def make_resume_overrides(run_dir: Path, weights: Path | None) -> str:
    """Return the overrides that go on with a run, as Python code passes them."""
    return " ".join(_make_overrides(run_dir, weights))


def make_resume_run_command(args: Sequence[str], run_dir: Path, weights: Path | None) -> str:
    """Return the command with these arguments, changed to go on with its run, for a shell."""
    overrides = _make_overrides(run_dir, weights)
    replaced = {RUN_DIR, *map(key_of, overrides)}
    unchanged = [arg for arg in args if key_of(arg) not in replaced]
    return shlex.join(hide_secret_values([*_find_program_words(args), *unchanged, *overrides]))


def make_resume_sweep_command(args: Sequence[str], sweep_dir: Path) -> str:
    """Return the command with these arguments, changed to go on with its sweep, for a shell."""
    unchanged = [arg for arg in args if key_of(arg) not in (RESUME, SWEEP_DIR)]
    override = f"{SWEEP_DIR}={_quote_path(sweep_dir)}"
    return shlex.join(hide_secret_values([*_find_program_words(args), *unchanged, override]))


def _make_overrides(run_dir: Path, weights: Path | None) -> list[str]:
    # A run has one origin, and its weights are in its checkpoints by now.
    cold_start = [] if weights is None else [f"{RESTORE}=null"]
    return [f"{RESUME}={_quote_path(run_dir)}", *cold_start]


def _quote_path(path: Path) -> str:
    """Return a path as the value of an override: ./1 isn't a number, and ./auto isn't a choice."""
    text = str(path) if "/" in str(path) else f"./{path}"
    return text if _PLAIN.fullmatch(text) else quote_value(text)


def _find_program_words(args: Sequence[str]) -> list[str]:
    """The words before the arguments, as they were typed; `main` may be called from Python too."""
    plugins, typed = take_flags(sys.orig_argv)
    count = len(typed) - len(args)
    if count > 0 and list(args) == typed[count:]:
        return [*typed[:count], *to_flags(plugins)]
    return ["python", "-m", "pipeline"]
