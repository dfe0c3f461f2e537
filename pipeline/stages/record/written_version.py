"""The version of this package that wrote a run, and whether this version may resume the run.

provenance.json may come from a stranger, so its content is only compared and shown.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.name_text import show_name
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.summary import find_version

PACKAGE_NAME = "recipe-pipeline"
PROGRAM = "python -m pipeline"
COMMIT_DIGITS = 12
"""Number of digits of a commit that are shown."""


def require_readable_version(run_dir: Path) -> None:
    """Raise RecipeError if a run was written by a version whose runs this one can't resume."""
    if problem := explain_other_version(run_dir):
        raise RecipeError([problem])


def explain_other_version(run_dir: Path, current: str | None = None) -> str | None:
    """Return why this version can't resume a run: the version that wrote it, those that can resume
    it, and what this one can still do. None if it can, or if the version isn't recorded.

    `current` is this version; None for the installed one.
    """
    process = _find_writer(run_dir)
    text = str(process.get("versions", {}).get(PACKAGE_NAME, ""))
    current = current or find_version(PACKAGE_NAME)
    if text in ("", current):
        return None
    try:
        this = Version(current)
    except InvalidVersion:  # the package isn't installed
        return None
    readers = _explain_readers(text, this, process)
    if readers is None:
        return None
    origin = f"{run_dir}: was written by {PACKAGE_NAME} {show_name(text)}, {readers}"
    command = f"convert weights {shlex.quote(str(run_dir))} weights.safetensors"
    return f"{origin}; this is {current}, which can still export its weights: {PROGRAM} {command}"


def _explain_readers(text: str, this: Version, process: Mapping[str, Any]) -> str | None:
    """Return what kind of version `text` is, and which can resume its runs; None if `this` can."""
    try:
        writer = Version(text)
    except ValueError:  # also a number of too many digits
        writer = None
    if writer is None or writer.is_devrelease or writer.local is not None:
        commit = _find_commit(process)
        state = f"that state, commit {commit}," if commit else "that state"
        return f"an unreleased state, and only {state} can resume it"
    series = f"from {writer} to below {writer.major + 1}.0 can resume it"
    if writer.major != this.major:
        return f"another major version, and versions {series}"
    is_unstable = writer.is_prerelease or this.is_prerelease
    if writer > this and (writer.minor > this.minor or is_unstable):
        return f"a newer version, and versions {series}"
    return None


def _find_writer(run_dir: Path) -> Mapping[str, Any]:
    """Return the newest process of a run that recorded versions; {} if none did."""
    try:
        processes = read_provenance(run_dir)
    except DataError:  # the resumed run warns of the file
        return {}
    recorded = [process for process in processes if isinstance(process.get("versions"), dict)]
    return recorded[-1] if recorded else {}


def _find_commit(process: Mapping[str, Any]) -> str:
    """Return the commit of the code that a process ran, shortened; "" if it isn't recorded."""
    match process:
        case {"code": {"git": {"commit": str(commit)}}}:
            return show_name(commit[:COMMIT_DIGITS])
    return ""
