"""Writing a file so that a reader, or a crash, never meets half of it."""

from __future__ import annotations

import os
from pathlib import Path


def write_whole(path: Path, text: str) -> None:
    """Replace the file at `path` by `text`, as a whole."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft.write_text(text, encoding="utf-8")
    os.replace(draft, path)
