"""Folder of a run's checkpoints: one rule for readers and writers says which entries are one.

A checkpoint is a folder named by its step, in decimal digits without leading zeros, that holds a
manifest or, of versions that wrote none, arrays. The manifest shows whether it is sound. Any other
entry of such a name is a stranger, which blocks a name that a run may need. An entry that is not
complete yet, or is being removed, has the suffix of a draft.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

from pipeline.files.atomic_write import sync

FOLDER = "checkpoints"
STATE, HOST, RECIPE, METRICS = "state", "host", "recipe", "metrics"
"""Folders of a checkpoint; the last one only where the best is kept."""
JSON = "metadata"
"""File in `HOST` and `RECIPE`."""
MANIFEST = "manifest.json"
DRAFT = ".orbax-checkpoint-tmp"
"""Suffix of a checkpoint that is not complete: orbax's, which older versions have left too."""
STEP = re.compile(r"(0|[1-9][0-9]*)")


def step_of(path: Path) -> int | None:
    """Return the step that a path is named by; None where that is no step.

    Digits of other scripts are none: `int` would read some of them.
    """
    return int(path.name) if STEP.fullmatch(path.name) else None


def saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending, sound or damaged."""
    return sorted(step for step, path in _numbered(root) if _is_checkpoint(path))


def strangers(root: Path) -> list[Path]:
    """Return entries named as a checkpoint that are none: a file, a link, somebody's folder."""
    return sorted(path for _, path in _numbered(root) if not _is_checkpoint(path))


def set_aside(path: Path, why: str) -> Path:
    """Rename an entry to `<why>-<name>-<n>`, so that its step can be saved. Raises OSError."""
    names = (path.with_name(f"{why}-{path.name}-{n}") for n in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint atomically: it is renamed to a draft first. Raises OSError."""
    draft = path.rename(path.with_name(f"{path.name}{DRAFT}"))
    # Else a power cut could leave a part of it under its name.
    sync(path.parent)
    remove_draft(draft)


def remove_drafts(root: Path) -> None:
    """Remove the drafts that a killed process has left."""
    for path in _entries(root):
        if path.name.endswith(DRAFT) and STEP.fullmatch(path.name.removesuffix(DRAFT)):
            remove_draft(path)


def remove_draft(path: Path) -> None:
    """Remove a draft as far as the system permits: the rest takes room, but is never read."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _numbered(root: Path) -> Iterator[tuple[int, Path]]:
    for path in _entries(root):
        step = step_of(path)
        if step is not None:
            yield step, path


def _entries(root: Path) -> list[Path]:
    """List a folder; empty where there is none. Raises OSError where it can't be listed."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_checkpoint(path: Path) -> bool:
    # By `os.path`, which treats an entry without permission as missing.
    return not os.path.islink(path) and (
        os.path.isfile(path / MANIFEST) or os.path.isdir(path / STATE)
    )
