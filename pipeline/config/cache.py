"""Folders of the cache, in which runs share downloads and compiled programs."""

from __future__ import annotations

import shlex
import stat
from collections.abc import Callable
from pathlib import Path

from pipeline.config.recipe import CacheSpec
from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import find_user_cache
from pipeline.core.files.trusted_files import find_foreign_owner, find_writers

PROGRAMS = "xla-2"
"""Name of the folder of compiled programs. Its number is raised if their format changes."""


def cache_root(cache: CacheSpec) -> Path:
    """Return the recipe's cache folder, by default `pipeline` in $XDG_CACHE_HOME or in ~/.cache.

    Raises RecipeError if the user has no home folder.
    """
    if cache.root is not None:
        return cache.root
    try:
        return find_user_cache()
    except RuntimeError as error:
        problem = "missing; this user has no home folder, so name one: cache.root=DIR"
        raise RecipeError([f"cache.root: {problem}"]) from error


def find_program_folder(cache: CacheSpec, warn: Callable[[str], None]) -> Path | None:
    """Return the folder of compiled programs; None if the recipe doesn't keep programs.

    If other users can add programs to the folder, which would be executed, returns None and calls
    `warn` with a message.
    """
    if not cache.compiled:
        return None
    root = cache_root(cache)
    if exposure := find_exposure(root):
        warn("; ".join(exposure))
        return None
    return root / PROGRAMS


def find_exposure(root: Path) -> tuple[str, str] | None:
    """Return which folder of a cache lets other users add programs, and advice; None if none does.

    `root` may have the sticky bit, as /tmp does: other users can't remove or rename this user's
    files there, and programs are in a folder inside it.
    """
    effect = "so compiled programs are neither read nor kept"
    folder_advice = "name another folder: cache.root=DIR"
    for folder in (root, root / PROGRAMS):
        try:
            status = folder.stat()
        except OSError:
            # A missing folder will be created for this user alone; from others nothing is read.
            continue
        if owner := find_foreign_owner(status):
            return f"{folder}: belongs to {owner}, {effect}", folder_advice
        writers = find_writers(status)
        is_sticky_root = folder == root and status.st_mode & stat.S_ISVTX
        if writers and not is_sticky_root:
            advice = f"chmod go-w {shlex.quote(str(folder))}, or {folder_advice}"
            return f"{folder}: can be written by {writers}, {effect}", advice
    return None
