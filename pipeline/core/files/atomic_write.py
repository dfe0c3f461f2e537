"""Atomic writes: neither a reader, a crash nor a power cut leaves or sees half of a file.

The system writes to the disk when it likes, and names before contents: a file that was renamed and
not synced may be empty after a power cut. So a draft is synced before it gets its name.
"""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path

UNSYNCABLE = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES})
"""Answers for folders that can't be synced: by their file system, or without the right to read."""

DEVICES = Path("/dev")


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the file at `path` by `content` atomically, as `commit` does; text is written in
    UTF-8.

    Bytes of file names that aren't UTF-8, surrogates in a text, are written as on the console and
    in JSON: 0xff as \\udcff.

    `mode` gives the permissions, reduced by the umask. Raises OSError with the file's name if
    the system refuses; the file is unchanged then. A device, such as /dev/null or /dev/stdout, is
    written to, and never replaced.
    """
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    if _is_device(path):
        _write_to_device(path, encoded)
        return
    # Machines that share a file system may have processes with the same id.
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        # Always a new file: in somebody else's folder, that name may be a link placed there.
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(encoded)
        commit(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise


def _is_device(path: Path) -> bool:
    """Whether a path is a device's, or a link's to a device or to a stream of the process."""
    return path.absolute().parent == DEVICES or path.is_char_device() or path.is_block_device()


def _write_to_device(path: Path, content: bytes) -> None:
    """Write to a device. Raises OSError with its name."""
    try:
        with path.open("wb") as device:
            device.write(content)
    except OSError as error:
        error.filename = str(path)
        raise


def commit(draft: Path, path: Path) -> None:
    """Rename a finished draft, a file or a folder, to `path`; a file there is replaced.

    A power cut at any moment leaves at `path` what was there before or all of the draft; once this
    returns, the draft. Raises OSError.
    """
    sync_tree(draft)
    draft.replace(path)
    sync(path.parent)


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder with everything in it. Raises OSError."""
    if path.is_dir():
        with os.scandir(path) as entries:
            inside = [Path(entry.path) for entry in entries]
        for entry in inside:
            sync_tree(entry)
    sync(path)


def sync_ancestors(path: Path) -> None:
    """Sync the folders above a file or folder, as far as its file system goes, so that it has its
    path after a power cut. Raises OSError."""
    folder = path.resolve()
    while not os.path.ismount(folder):
        folder = folder.parent
        sync(folder)


def sync(path: Path) -> None:
    """Wait until the content of a file, or the names in a folder, outlive a power cut.

    If folders can't be synced, the order of changes is left to the file system. Raises OSError
    with the name of the file.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in UNSYNCABLE and path.is_dir():
            return
        error.filename = str(path)
        raise
