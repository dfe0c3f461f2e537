"""Atomic writes: neither a reader nor a crash leaves or sees half of a file."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the file at `path` by `content` atomically; text is written in UTF-8.

    Bytes of file names that aren't UTF-8, surrogates in a text, are written as on the console and
    in JSON: 0xff as \\udcff.

    `mode` gives the permissions, reduced by the umask. Raises OSError with the file's name where
    the system refuses; the file is unchanged then.
    """
    # Machines that share a file system may have processes with the same id.
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        # Always a new file: in somebody else's folder, that name may be a link placed there.
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(
                content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
            )
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise
