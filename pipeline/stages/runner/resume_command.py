"""The command that resumes a run or a sweep that ended early, for a shell or for Python.

Passwords are replaced by `***`: the user must type them again.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pipeline.config.overrides import get_key, hide_secret_values, quote_value
from pipeline.core.plugins.loading import take_flags, to_flags

RESUME = "train.resume"
RESTORE = "checkpoint.restore"
RUN_DIR = "hydra.run.dir"
SWEEP_DIR = "hydra.sweep.dir"
_PLAIN = re.compile(r"[\w.-]*(/[\w.-]+)+", re.ASCII)
"""A path that Hydra reads as text without quotes."""

HowToResume = Callable[[Path, Path | None], str | None]
"""(run directory, weights that the run started from or None) -> command to resume the run; None if
another process prints it."""


def make_resume_overrides(run_dir: Path, weights: Path | None) -> str:
    """Return the overrides that resume a run, for Python code."""
    return " ".join(_make_overrides(run_dir, weights))


def make_resume_run_command(args: Sequence[str], run_dir: Path, weights: Path | None) -> str:
    """Return the shell command that resumes the run of a command with arguments `args`."""
    overrides = _make_overrides(run_dir, weights)
    replaced = {RUN_DIR, *map(get_key, overrides)}
    unchanged = [arg for arg in args if get_key(arg) not in replaced]
    return shlex.join(hide_secret_values([*_find_program_words(args), *unchanged, *overrides]))


def make_resume_sweep_command(args: Sequence[str], sweep_dir: Path) -> str:
    """Return the shell command that resumes the sweep of a command with arguments `args`."""
    words = [arg for arg in args if get_key(arg) not in (RESUME, SWEEP_DIR)]
    # Keys after -- belong to the second side of a comparison.
    end = words.index("--") if "--" in words else len(words)
    words.insert(end, f"{SWEEP_DIR}={_quote_path(sweep_dir)}")
    return shlex.join(hide_secret_values([*_find_program_words(args), *words]))


def _make_overrides(run_dir: Path, weights: Path | None) -> list[str]:
    overrides = [f"{RESUME}={_quote_path(run_dir)}"]
    if weights is not None:
        # A resumed run can't restore other weights.
        overrides.append(f"{RESTORE}=null")
    return overrides


def _quote_path(path: Path) -> str:
    """Return a path as the value of an override; `./` keeps Hydra from reading 1 as a number."""
    text = str(path) if "/" in str(path) else f"./{path}"
    return text if _PLAIN.fullmatch(text) else quote_value(text)


def _find_program_words(args: Sequence[str]) -> list[str]:
    """Return the words of the command before its arguments; a default if Python called `main`."""
    plugins, words = take_flags(sys.orig_argv)
    program = words[: max(len(words) - len(args), 0)]
    # A custom script may pass its arguments on. Those of the package may have been renamed.
    passes_arguments = args and list(args) == words[len(program) :]
    if program and (passes_arguments or program[-1].rpartition("/")[2] == "pipeline"):
        return [*program, *to_flags(plugins)]
    return ["python", "-m", "pipeline", *to_flags(plugins)]
