"""Writing a file so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, as a whole.

    Where the system refuses, the file stays as it was, and the OSError has its name.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        draft.write_text(text, encoding="utf-8")
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise
