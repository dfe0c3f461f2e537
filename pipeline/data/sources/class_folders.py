"""Folders of files, one for each class."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import hold_out
from pipeline.data.image_file import KINDS, SUFFIXES

EVAL_FOLDERS = ("eval", "val", "test")
"""Names of the folder of the evaluation split. The first folder that exists is used."""
ANNOTATIONS = ("annotations", "labels")
"""Names of a folder with the boxes of objects, in lower case."""
_MAX_LISTED = 5
"""The most suffixes of files that a note lists."""


@dataclass(frozen=True)
class FileKind:
    """A kind of files, by their suffixes, and its words for messages."""

    noun: str
    suffixes: Sequence[str]
    formats: str


IMAGES = FileKind("image", SUFFIXES, KINDS)


@dataclass(frozen=True)
class ClassSplits:
    """The files of both splits, the class of each, and what isn't read."""

    paths: Sequence[Sequence[str]]
    labels: Sequence[np.ndarray]
    """int32 (n,) for each split."""
    classes: tuple[str, ...]
    notes: tuple[str, ...]
    """At most one line for the log, about files of other kinds."""


def list_class_splits(
    root: Path, kind: FileKind, within: Path | None, share: float | None, seed: int
) -> ClassSplits:
    """List the files of classes in train/ and eval/, or if `share` isn't None those in `root`, of
    which a share of each class is evaluated. Raises DataError as `list_classes` does, if a folder
    is missing, and if both splits don't have the same classes."""
    if share is None:
        train_folder, eval_folder = find_splits(root, noun=kind.noun)
        classes = list_class_folders(train_folder)
        if list_class_folders(eval_folder) != classes:
            different = sorted(set(classes) ^ set(list_class_folders(eval_folder)))
            raise DataError(
                f"{train_folder} and {eval_folder} must have the same class folders; "
                f"only one of them has {', '.join(different)}"
            )
        files = [
            list_classes(folder, classes, within, kind) for folder in (train_folder, eval_folder)
        ]
        paths = [split.paths for split in files]
        labels = [split.labels for split in files]
    else:
        eval_folders = [name for name in EVAL_FOLDERS if (root / name).is_dir()]
        if eval_folders and (root / "train").is_dir():
            raise DataError(
                f"{root}: has the folders train and {eval_folders[0]}, so that dataset.split "
                f"= {share} has nothing to split; leave it out, or name the folder of the classes"
            )
        classes = list_class_folders(root)
        files = [list_classes(root, classes, within, kind)]
        with name_file(root):
            split_rows = hold_out(files[0].labels, classes, share, seed)
        paths = [[files[0].paths[row] for row in rows] for rows in split_rows]
        labels = [files[0].labels[rows] for rows in split_rows]
    left_out = [path for part in files for path in part.left_out]
    notes = describe_left_out(left_out, "folders of classes", kind.formats)
    return ClassSplits(paths, labels, classes, notes)


def find_splits(root: Path, content: str = "", noun: str = "image") -> tuple[Path, Path]:
    """Return the folders of the training and the evaluation split. Raises DataError if one is
    missing. Its message has `content`, a description of what the folders must have, and `noun`."""
    if not root.is_dir():
        raise DataError(f"{root}: there is no such folder")
    train = root / "train"
    candidates = [root / name for name in EVAL_FOLDERS]
    evaluation = next((folder for folder in candidates if folder.is_dir()), None)
    if not train.is_dir() or evaluation is None:
        raise DataError(
            f"{root}: must have the folders train and one of {', '.join(EVAL_FOLDERS)}{content}; "
            f"of {noun}s in one folder, dataset.split=0.2 holds out a part"
        )
    return train, evaluation


def list_class_folders(folder: Path) -> tuple[str, ...]:
    """Return the sorted names of the visible folders in `folder`. Raises DataError without any."""
    names = tuple(entry.name for entry in _scan_folder(folder) if _has_kind(entry.is_dir))
    if not names:
        problem = f"{folder}: must have one folder per class; it has none"
        raise DataError(problem + _hint_at_boxes(folder.parent.parent))
    return names


@dataclass(frozen=True)
class ClassFiles:
    """The files of all classes."""

    paths: Sequence[str]
    """The files, class by class."""
    labels: np.ndarray
    """The class of each file, int32 (n,)."""
    left_out: Sequence[str]
    """Files of other kinds."""


def list_classes(
    folder: Path, classes: Sequence[str], within: Path | None, kind: FileKind = IMAGES
) -> ClassFiles:
    """List the files of each class. Raises DataError for a class without files, for links out of
    `within`, and for a single class with all files in subfolders, since these may be the classes.
    """
    paths: list[str] = []
    counts = []
    left_out = [entry.path for entry in _scan_folder(folder) if not _has_kind(entry.is_dir)]
    for name in classes:
        files, others = list_files(folder / name, within, kind)
        paths += files
        counts.append(len(files))
        left_out += others
    if len(classes) == 1 and not any(Path(path).parent == folder / classes[0] for path in paths):
        raise DataError(
            f"{folder}: must have one folder per class; it has only {classes[0]}, whose "
            f"{kind.noun}s are in subfolders; did you mean dataset.root={folder / classes[0]}?"
        )
    labels = np.repeat(np.arange(len(classes), dtype=np.int32), counts)
    return ClassFiles(paths, labels, left_out)


def list_files(
    folder: Path, within: Path | None = None, kind: FileKind = IMAGES
) -> tuple[list[str], list[str]]:
    """Return the visible files of a folder, sorted, then of its subfolders: those of a kind, which
    have one of its suffixes, and other files and entries, such as pipes. Raises DataError without
    any of the kind, and for links out of `within`; None permits all links."""
    require_within(folder, within)
    files = []
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
            elif _has_kind(entry.is_file) and entry.name.lower().endswith(tuple(kind.suffixes)):
                files.append(entry.path)
            else:
                left_out.append(entry.path)
        stack += reversed(folders)  # The first subfolder is popped next.
    if not files:
        problem = f"{folder}: holds no {kind.noun} ({', '.join(kind.suffixes)})"
        raise DataError(problem + _hint_at_boxes(folder.parent) * (kind is IMAGES))
    return files, left_out


def _hint_at_boxes(folder: Path) -> str:
    """Return a sentence if a folder has one of annotations, as datasets for detection have."""
    names = [entry.name for entry in _scan_folder(folder) if entry.name.lower() in ANNOTATIONS]
    if not names:
        return ""
    return (
        f"; if {names[0]} has boxes of objects: these aren't predicted here (detection), but "
        "images that are cut out by them can be classified"
    )


def describe_left_out(
    left_out: Sequence[str], folders: str, formats: str = KINDS
) -> tuple[str, ...]:
    """Return a tuple of one note about files that aren't read; () if all are read. `folders`
    describes the folders of which files in `formats` are read."""
    if not left_out:
        return ()
    counts = Counter(Path(path).suffix.lower() or "no suffix" for path in left_out).most_common()
    kinds = [f"{count:,} of {show_name(suffix)}" for suffix, count in counts[:_MAX_LISTED]]
    if len(counts) > _MAX_LISTED:
        kinds.append(f"{len(counts) - _MAX_LISTED} more kinds")
    plural = "s" if len(left_out) > 1 else ""
    return (
        f"left out: {len(left_out):,} file{plural} ({', '.join(kinds)}), such as "
        f"{show_name(left_out[0])}; {formats} in {folders} are read",
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
