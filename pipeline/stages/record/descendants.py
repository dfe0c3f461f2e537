"""descendants.jsonl: the list of exports, converted weights and reproductions of a run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pipeline.core.files.atomic_write import format_json
from pipeline.core.files.trusted_files import open_unshared

DESCENDANTS = "descendants.jsonl"
Made = Literal["exported", "converted", "reproduced"]
"""How a descendant was made."""
MAX_BYTES = 1 << 20
"""Most bytes of the file that are read, enough for ten thousand entries."""


@dataclass(frozen=True)
class Descendant:
    """An export, converted weights or a reproduction of a run."""

    made: Made
    to: str
    """Absolute path."""
    at: str = ""
    """Time, ISO 8601."""


def note_descendant(run_dir: Path, made: Made, to: Path) -> None:
    """Append a descendant at the path `to`. Errors of the file system are ignored."""
    entry = Descendant(made, os.path.abspath(to), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with (
        suppress(OSError),
        open(run_dir / DESCENDANTS, "a", encoding="utf-8", opener=open_unshared) as file,
    ):
        file.write(format_json(asdict(entry)) + "\n")


def read_descendants(run_dir: Path) -> Sequence[Descendant]:
    """Read the descendants of a run; for each kind and path the newest entry.

    Invalid lines are skipped, since the file may come from a stranger.
    """
    file = run_dir / DESCENDANTS
    if not file.is_file():
        return []
    try:
        with file.open("rb") as opened:
            lines = opened.read(MAX_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    descendants: dict[tuple[str, str], Descendant] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            made = entry.get("made")
            to = entry.get("to")
            at = entry.get("at")
        except (ValueError, AttributeError, RecursionError):
            continue
        if made in get_args(Made) and isinstance(to, str):
            descendants[made, to] = Descendant(made, to, at if isinstance(at, str) else "")
    return list(descendants.values())
