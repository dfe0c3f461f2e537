"""Folders of files, one for each class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.error_text import show_name
from pipeline.data.file_errors import name_file
from pipeline.data.image_file import KINDS, SUFFIXES

EVAL_FOLDERS = ("eval", "val", "test")
"""Names of the folder of the evaluation split. The first folder that exists is used."""
_MAX_LISTED = 5
"""The most suffixes of files that a note lists."""


def find_splits(root: Path, content: str = "") -> tuple[Path, Path]:
    """Return the folders of the training and the evaluation split. Raises DataError if one is
    missing. Its message has `content`, a description of what the folders must have."""
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    train = root / "train"
    candidates = [root / name for name in EVAL_FOLDERS]
    evaluation = next((folder for folder in candidates if folder.is_dir()), None)
    if not train.is_dir() or evaluation is None:
        raise DataError(
            f"{root}: must have the folders train and one of {', '.join(EVAL_FOLDERS)}{content}; "
            "of images in one folder, dataset.split=0.2 holds out a part"
        )
    return train, evaluation


def list_class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the visible folders in `folder`. Raises DataError without any."""
    names = tuple(entry.name for entry in _scan_folder(folder) if _has_kind(entry.is_dir))
    if not names:
        raise DataError(f"{folder}: must have one folder per class; it has none")
    return names


@dataclass(frozen=True)
class ClassImages:
    """The image files of all classes."""

    paths: Sequence[str]
    """The files, class by class."""
    labels: np.ndarray
    """The class of each file, int32 (n,)."""
    left_out: Sequence[str]
    """Files of other kinds."""


def list_classes(folder: Path, classes: Sequence[str], within: Path | None) -> ClassImages:
    """List the images of each class. Raises DataError for a class without images, for links out of
    `within`, and for a single class with all images in subfolders, since these may be the classes.
    """
    paths: list[str] = []
    counts = []
    left_out = [entry.path for entry in _scan_folder(folder) if not _has_kind(entry.is_dir)]
    for name in classes:
        images, others = list_images(folder / name, within)
        paths += images
        counts.append(len(images))
        left_out += others
    if len(classes) == 1 and not any(Path(path).parent == folder / classes[0] for path in paths):
        raise DataError(
            f"{folder}: must have one folder per class; it has only {classes[0]}, whose images "
            f"are in subfolders; did you mean dataset.root={folder / classes[0]}?"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return ClassImages(paths, labels, left_out)


def list_images(
    folder: Path, within: Path | None = None, suffixes: Sequence[str] = SUFFIXES
) -> tuple[list[str], list[str]]:
    """Return the visible files of a folder, sorted, then of its subfolders: images, which have one
    of the suffixes, and other files and entries, such as pipes. Raises DataError without images,
    and for links out of `within`; None permits all links."""
    require_within(folder, within)
    images = []
    left_out = []
    stack: list[tuple[Path, frozenset[Path]]] = [(folder, frozenset())]
    while stack:
        current, ancestors = stack.pop()
        real = current.resolve()
        if real in ancestors:
            continue  # a link to a folder that contains it
        folders = []
        for entry in _scan_folder(current):
            if entry.is_symlink():
                require_within(Path(entry.path), within)
            if _has_kind(entry.is_dir):
                folders.append((Path(entry.path), ancestors | {real}))
            elif _has_kind(entry.is_file) and entry.name.lower().endswith(tuple(suffixes)):
                images.append(entry.path)
            else:
                left_out.append(entry.path)
        stack += reversed(folders)  # The first subfolder is popped next.
    if not images:
        raise DataError(f"{folder}: holds no image ({', '.join(suffixes)})")
    return images, left_out


def describe_left_out(left_out: Sequence[str], folders: str) -> tuple[str, ...]:
    """Return a tuple of one note about files that aren't read; () if all are read. `folders`
    describes the folders whose images are read."""
    if not left_out:
        return ()
    counts = Counter(Path(path).suffix.lower() or "no suffix" for path in left_out).most_common()
    kinds = [f"{count:,} of {show_name(suffix)}" for suffix, count in counts[:_MAX_LISTED]]
    if len(counts) > _MAX_LISTED:
        kinds.append(f"{len(counts) - _MAX_LISTED} more kinds")
    plural = "s" if len(left_out) > 1 else ""
    return (
        f"left out: {len(left_out):,} file{plural} ({', '.join(kinds)}), such as "
        f"{show_name(left_out[0])}; {KINDS} in {folders} are read",
    )


def require_within(path: Path, folder: Path | None) -> None:
    """Raise DataError if a path leads out of a folder; None permits every path."""
    # `Path.resolve` raises RuntimeError for a loop of links in Python 3.11 and 3.12.
    target = Path(os.path.realpath(path))
    if folder is not None and not target.is_relative_to(folder):
        raise DataError(
            f"{path}: leads out of {folder}, to {target}; copy its target, or set "
            "dataset.follow_links=true on the command line"
        )


def _has_kind(is_kind: Callable[[], bool]) -> bool:
    """Return whether an entry is a file or folder, or leads to one, by its method. False for a loop
    of links."""
    # `os.path.isfile` would ask the file system for each image.
    try:
        return is_kind()
    except OSError:
        return False


def _scan_folder(folder: Path) -> list[os.DirEntry[str]]:
    """Return a folder's visible entries, sorted by name. Raises DataError if it can't be read."""
    with name_file(folder), os.scandir(folder) as entries:
        visible = [entry for entry in entries if not entry.name.startswith(".")]
    return sorted(visible, key=lambda entry: entry.name)
