"""The image files of a folder, of folders in it too, and the files that are left out."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import shown
from pipeline.data.image_file import KINDS, SUFFIXES

_LISTED_KINDS = 5


@dataclass(frozen=True)
class Listing:
    """Files below a folder. Hidden ones don't count."""

    images: tuple[str, ...]
    """The files of a folder by name, then those of the folders in it."""
    left_out: tuple[str, ...]
    """Files of other kinds, and what isn't a file: a pipe of such a name would never end."""


def list_images(
    folder: Path, within: Path | None = None, suffixes: Sequence[str] = SUFFIXES
) -> Listing:
    """List a folder and all folders in it.

    Raises DataError if there is no image, for a link that leads out of `within`, and for a folder
    that can't be read.
    """
    require_within(folder, within)
    images, left_out = [], []
    waiting: list[tuple[Path, frozenset[Path]]] = [(folder, frozenset())]
    while waiting:
        current, ancestors = waiting.pop()
        real = current.resolve()
        if real in ancestors:
            continue  # A link to a folder that it lies in.
        folders = []
        for entry in _scan(current):
            if entry.is_symlink():
                require_within(Path(entry.path), within)
            if entry.is_dir():
                folders.append((Path(entry.path), ancestors | {real}))
            elif entry.is_file() and entry.name.lower().endswith(tuple(suffixes)):
                images.append(entry.path)
            else:
                left_out.append(entry.path)
        waiting += reversed(folders)
    if not images:
        raise DataError(f"{folder}: holds no image ({', '.join(suffixes)})")
    return Listing(tuple(images), tuple(left_out))


def files_beside_folders(folder: Path) -> tuple[str, ...]:
    """The entries of a folder that aren't folders, sorted by name."""
    return tuple(entry.path for entry in _scan(folder) if not entry.is_dir())


def left_out_notes(left_out: Sequence[str], folders: str) -> tuple[str, ...]:
    """A line about files that aren't read, unlike images in `folders`; none if there are none."""
    if not left_out:
        return ()
    kinds = Counter(Path(path).suffix.lower() or "no suffix" for path in left_out).most_common()
    listed = ", ".join(f"{count:,} of {shown(kind)}" for kind, count in kinds[:_LISTED_KINDS])
    more = f", {len(kinds) - _LISTED_KINDS} more kinds" if len(kinds) > _LISTED_KINDS else ""
    count = f"{len(left_out):,} file" + "s" * (len(left_out) > 1)
    example = shown(left_out[0])
    return (
        f"left out: {count} ({listed}{more}), such as {example}; {KINDS} in {folders} are read",
    )


def require_within(path: Path, folder: Path | None) -> None:
    """Raise DataError for a path that leads out of a folder; None allows every path."""
    if folder is not None and not path.resolve().is_relative_to(folder):
        raise DataError(
            f"{path}: leads out of {folder}, to {path.resolve()}; copy what is there, or give "
            "dataset.follow_links=true on the command line"
        )


def _scan(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            shown_entries = [entry for entry in entries if not entry.name.startswith(".")]
    except OSError as error:
        raise DataError(f"{folder}: can't be read: {error.strerror or error}") from error
    return sorted(shown_entries, key=lambda entry: entry.name)
