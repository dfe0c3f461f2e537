"""Writing a file so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from functools import partial
from pathlib import Path


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the file at `path` by `content`, as a whole; text is written in UTF-8.

    `mode` says who may do what with it, as far as the umask lets them. Where the system refuses,
    the file stays as it was, and the OSError has its name.
    """
    # Machines that share a file system may have processes of one number.
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        # Made here and now: in a folder of somebody else a link of that name may lie in wait.
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.replace(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise
