"""Folder of a run's checkpoints: names and kinds of its entries, and the archive for the autopsy of
a non-finite step, when its run is resumed."""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
from contextlib import suppress
from itertools import count
from pathlib import Path

from pipeline.core.files.atomic_write import sync

FOLDER = "checkpoints"
STATE = "state"
HOST = "host"
RECIPE = "recipe"
METRICS = "metrics"
"""Folders of a checkpoint: arrays, host state, recipe and, if the best is retained, metrics."""
META = "metadata"
"""JSON file in `HOST` and in `RECIPE`."""
SECRET = "features/privacy/"
"""Beginning of the names of arrays that only the owner of a run may read."""
MANIFEST = "manifest.json"
"""File of a checkpoint with the checksums of its other files."""
DRAFT = ".orbax-checkpoint-tmp"
"""Suffix of a draft, the same as orbax's."""
MIRROR_DRAFT = "mirror.part"
"""Folder of the run directory for files that are being copied from or to an address."""
_MISSING = frozenset((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ELOOP, errno.ENXIO))
_UNREADABLE = frozenset((errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN))
LOST = _MISSING | _UNREADABLE
"""Error numbers for a file that is missing or of another kind, or that the disk can't read. Other
numbers are problems of the process or its rights, and don't show that the file is damaged."""
STEP = re.compile(r"(0|[1-9][0-9]*)")
"""Name of a checkpoint. `int` would also accept leading zeros and the digits of other scripts."""


def make_checkpoint_path(root: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a folder of checkpoints."""
    return root / str(step)


def parse_checkpoint_step(path: Path) -> int | None:
    """Return the step of a checkpoint's path, or None for the path of anything else."""
    return int(path.name) if STEP.fullmatch(path.name) else None


def make_draft_path(path: Path) -> Path:
    """Return the path of the draft of a checkpoint, or of a file that is added to a checkpoint."""
    return path.with_name(f"{path.name}{DRAFT}")


def list_saved_steps(root: Path) -> list[int]:
    """Return the steps of the checkpoints in a folder, ascending, sound or damaged. Raises OSError
    if the folder can't be listed."""
    steps = []
    for path in _list_entries(root):
        step = parse_checkpoint_step(path)
        if step is not None and _is_checkpoint(path):
            steps.append(step)
    return sorted(steps)


def find_strangers(root: Path) -> list[Path]:
    """Return the strangers in a folder, sorted. Examples are a file, a link, and a checkpoint that
    was renamed to `0441` or `441.0`. Raises OSError if the folder can't be listed."""
    return sorted(
        path
        for path in _list_entries(root)
        if _is_number(path.name)
        and (parse_checkpoint_step(path) is None or not _is_checkpoint(path))
    )


def rename_aside(path: Path, reason: str) -> Path:
    """Rename an entry to `<reason>-<name>-<n>`, so that its step can be saved. Raises OSError."""
    targets = (path.with_name(f"{reason}-{path.name}-{n}") for n in count(1))
    unused_target = next(target for target in targets if not os.path.lexists(target))
    return path.rename(unused_target)


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint atomically: it is renamed to a draft first. Raises OSError."""
    draft = path.rename(make_draft_path(path))
    # After a power cut, an unsynced folder could have a part of the checkpoint under its old name.
    sync(path.parent)
    remove_draft(draft)


def remove_drafts(root: Path) -> None:
    """Remove the drafts that a killed process has left."""
    for path in _list_entries(root):
        checkpoint = path.with_name(path.name.removesuffix(DRAFT))
        if path != checkpoint and parse_checkpoint_step(checkpoint) is not None:
            remove_draft(path)


def remove_draft(path: Path) -> None:
    """Remove a draft as far as the system permits. A remaining part of it is never read."""
    with suppress(OSError):
        if path.is_symlink() or path.is_file():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def _is_number(name: str) -> bool:
    """Return whether a name can be read as a number, in any spelling or script."""
    try:
        float(name)
    except ValueError:
        return name.isnumeric()
    # `float` also reads nan and inf, which have no digit.
    return any(letter.isnumeric() for letter in name)


def _list_entries(root: Path) -> list[Path]:
    """List a folder; empty if it is missing. Raises OSError if it can't be listed."""
    try:
        return list(root.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _is_checkpoint(path: Path) -> bool:
    """Return whether a path is a folder, not a link, with a manifest or arrays. Raises OSError."""
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


AUTOPSY = "autopsy.json"
"""File of the findings about a non-finite step that ended the run."""
REPRODUCER = "reproducer"
"""Folder with the files that repeat that step."""
EARLIER_AUTOPSY = "earlier_autopsy"
"""Archive folder, with the `AUTOPSY` and `REPRODUCER` that the run had when it was resumed."""


def set_aside_autopsy(run_dir: Path) -> Path | None:
    """Move an autopsy into the archive, and return the archive folder; None without an autopsy.

    `python -m pipeline autopsy` accepts that folder like a run directory. Raises OSError.
    """
    paths = [run_dir / name for name in (AUTOPSY, REPRODUCER) if (run_dir / name).exists()]
    if not paths:
        return None
    folder = run_dir / EARLIER_AUTOPSY
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in paths:
        path.rename(folder / path.name)
    return folder
