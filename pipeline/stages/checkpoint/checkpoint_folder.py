"""Folder of a run's checkpoints: what in it is one, by the same rule for all who read and write.

A checkpoint is a folder named by its step, in decimal digits without leading zeros, that holds a
manifest or, of versions that wrote none, arrays. Whether it is sound, the manifest shows. Any other
entry of such a name is a stranger, in the way of what a run may save. What is not complete yet, or
is being removed, has the ending of a draft.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from itertools import count
from pathlib import Path

FOLDER = "checkpoints"
STATE, HOST, RECIPE, METRICS = "state", "host", "recipe", "metrics"
"""Folders that a checkpoint is made of; the last where the best is kept."""
JSON = "metadata"
"""File in `HOST` and `RECIPE`."""
MANIFEST = "manifest.json"
DRAFT = ".orbax-checkpoint-tmp"
"""Ending of a checkpoint that is not complete: orbax's, which older versions have left too."""
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
    """Return what is named as a checkpoint and is none: a file, a link, somebody's folder."""
    return sorted(path for _, path in _numbered(root) if not _is_checkpoint(path))


def set_aside(path: Path, why: str) -> Path:
    """Rename an entry to `<why>-<name>-<n>`, so that its step can be saved. Raises OSError."""
    names = (path.with_name(f"{why}-{path.name}-{n}") for n in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint, which is one or is none at any moment. Raises OSError."""
    remove_draft(path.rename(path.with_name(f"{path.name}{DRAFT}")))


def remove_drafts(root: Path) -> None:
    """Remove what was left incomplete."""
    for path in _entries(root):
        if path.name.endswith(DRAFT) and STEP.fullmatch(path.name.removesuffix(DRAFT)):
            remove_draft(path)


def remove_draft(path: Path) -> None:
    """Remove a draft as far as the system lets it go: the rest takes room and is read by nobody."""
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
    """Whatever a folder holds; nothing where there is none. Raises OSError where it is closed."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_checkpoint(path: Path) -> bool:
    # Of `os.path`, which takes what may not be looked at for missing.
    return not os.path.islink(path) and (
        os.path.isfile(path / MANIFEST) or os.path.isdir(path / STATE)
    )
