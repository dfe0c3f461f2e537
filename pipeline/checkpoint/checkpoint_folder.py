"""Folder of a run's checkpoints: one rule for readers and writers about its entries.

A checkpoint is a folder named by its step, in decimal digits without leading zeros, that holds a
manifest or, of versions that wrote none, arrays. The manifest shows whether it is sound. Any other
entry of such a name is a stranger, which blocks a name that a run may need, and so is one whose
name is another spelling of a number, which might be taken for a checkpoint. An entry that is not
complete yet, or is being removed, has the suffix of a draft.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from itertools import count
from pathlib import Path

from pipeline.core.files.atomic_write import sync

FOLDER = "checkpoints"
STATE = "state"
HOST = "host"
RECIPE = "recipe"
METRICS = "metrics"
"""Folders of a checkpoint; the last one only if the best is retained."""
JSON = "metadata"
"""File in `HOST` and `RECIPE`."""
MANIFEST = "manifest.json"
DRAFT = ".orbax-checkpoint-tmp"
"""Suffix of a checkpoint that is not complete, the same as orbax's."""
LOST = frozenset(
    {
        *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO),
        *(errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN),
    }
)
"""Errors about a file itself: it isn't there, is something else, or the disk can't read it. Any
other is about the process or its rights, and shows no damage."""
STEP = re.compile(r"(0|[1-9][0-9]*)")


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a folder of checkpoints."""
    return root / str(step)


def checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint's path, or None for the path of anything else.

    Digits of other scripts don't count: `int` would read some of them.
    """
    return int(path.name) if STEP.fullmatch(path.name) else None


def draft_path(path: Path) -> Path:
    """Return the path of the draft of a checkpoint, or of a file that is added to one."""
    return path.with_name(f"{path.name}{DRAFT}")


def saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending, sound or damaged.

    Raises OSError if the system refuses to show them.
    """
    named = ((checkpoint_step(path), path) for path in _entries(root))
    return sorted(step for step, path in named if step is not None and _is_checkpoint(path))


def strangers(root: Path) -> list[Path]:
    """Return entries that aren't checkpoints and have a number as name: a file, a link, somebody's
    folder, a checkpoint that was renamed to `0441` or `441.0`. Raises OSError as `saved_steps`."""
    return sorted(
        path
        for path in _entries(root)
        if _is_number(path.name) and (checkpoint_step(path) is None or not _is_checkpoint(path))
    )


def set_aside(path: Path, why: str) -> Path:
    """Rename an entry to `<why>-<name>-<n>`, so that its step can be saved. Raises OSError."""
    names = (path.with_name(f"{why}-{path.name}-{n}") for n in count(1))
    return path.rename(next(name for name in names if not os.path.lexists(name)))


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint atomically: it is renamed to a draft first. Raises OSError."""
    draft = path.rename(draft_path(path))
    # Else a power cut could leave a part of it under its name.
    sync(path.parent)
    remove_draft(draft)


def remove_drafts(root: Path) -> None:
    """Remove the drafts that a killed process has left."""
    for path in _entries(root):
        complete = path.with_name(path.name.removesuffix(DRAFT))
        if path != complete and checkpoint_step(complete) is not None:
            remove_draft(path)


def remove_draft(path: Path) -> None:
    """Remove a draft as far as the system permits: the rest takes room, but is never read."""
    if path.is_symlink() or path.is_file():
        path.unlink(missing_ok=True)
    else:
        shutil.rmtree(path, ignore_errors=True)


def _is_number(name: str) -> bool:
    """Whether a name is a number in another spelling or script, for Python or for a reader."""
    try:
        float(name)
    except ValueError:
        return name.isnumeric()
    return any(map(str.isnumeric, name))


def _entries(root: Path) -> list[Path]:
    """List a folder; empty if it is missing. Raises OSError if it can't be listed."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_checkpoint(path: Path) -> bool:
    if os.path.islink(path):
        return False
    for name, is_kind in ((MANIFEST, stat.S_ISREG), (STATE, stat.S_ISDIR)):
        try:
            if is_kind((path / name).stat().st_mode):
                return True
        except OSError as error:
            if error.errno not in LOST:
                raise
    return False
