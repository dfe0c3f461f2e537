"""Writing a file so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, as a whole.

    Where the system refuses, the file stays as it was, and the OSError has its name.
    """
    # Machines that share a file system may have processes of one number.
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise
