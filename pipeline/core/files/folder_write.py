"""Writing of several files into a folder, of which nothing is left if it fails."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def make_folder(folder: Path) -> Iterator[None]:
    """Make a folder, and remove it if it was made and the block raises an error, unless it holds
    entries then. Raises OSError."""
    is_new = not folder.exists()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        yield
    except BaseException:
        if is_new:
            with suppress(OSError):
                folder.rmdir()
        raise


@contextmanager
def remove_if_failed(folder: Path, names: Collection[str]) -> Iterator[None]:
    """Remove the entries `names` that the block adds to a folder if it raises an error.

    Other entries stay, since another process may have added them.
    """
    added = [folder / name for name in names if not os.path.lexists(folder / name)]
    try:
        yield
    except BaseException:
        for path in added:
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
        raise
