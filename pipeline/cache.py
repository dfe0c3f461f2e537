"""Where downloads and compiled programs are kept between runs."""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.recipe import CacheSpec
from pipeline.errors import RecipeError
from pipeline.files.ownership import find_foreign_owner, find_writers

PROGRAMS = "xla"


def cache_root(cache: CacheSpec) -> Path:
    """The cache folder: the recipe's, else `$XDG_CACHE_HOME/pipeline`, else `~/.cache/pipeline`.

    Raises RecipeError where nothing says where that is.
    """
    if cache.root is not None:
        return cache.root
    home = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(home) if home else Path.home() / ".cache") / "pipeline"
    except RuntimeError as error:
        reason = "missing; this user has no home folder, so name one: cache.root=DIR"
        raise RecipeError([f"cache.root: {reason}"]) from error


def program_folder(cache: CacheSpec, warn: Callable[[str], None]) -> Path | None:
    """The folder of compiled programs; None where none are to be kept.

    Nor are they where others may put theirs, which would be run: `warn` gets a line.
    """
    if not cache.compiled:
        return None
    root = cache_root(cache)
    if exposure := find_exposure(root):
        warn(f"{exposure}, so compiled programs are neither read nor kept; {exposure.advice}")
        return None
    return root / PROGRAMS


@dataclass(frozen=True)
class Exposure:
    """A folder of the cache into which others may put programs; as a text, how."""

    folder: Path
    how: str
    advice: str
    """What would be right."""

    def __str__(self) -> str:
        return f"{self.folder}: {self.how}"


def find_exposure(root: Path) -> Exposure | None:
    """How others may put programs into a cache; None where they can't.

    A cache folder whose sticky bit is set, such as /tmp, will do: there nobody removes or renames
    what is this user's, and programs are in a folder inside.
    """
    elsewhere = "name another folder: cache.root=DIR"
    for folder in (root, root / PROGRAMS):
        try:
            found = folder.stat()
        except OSError:
            # It is made for this user alone, or can't be used, which is reported then.
            continue
        if owner := find_foreign_owner(found):
            return Exposure(folder, f"belongs to {owner}", elsewhere)
        writers = find_writers(found)
        if writers and not (folder == root and found.st_mode & stat.S_ISVTX):
            advice = f"chmod go-w {shlex.quote(str(folder))}, or {elsewhere}"
            return Exposure(folder, f"can be written by {writers}", advice)
    return None
