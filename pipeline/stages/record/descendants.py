"""descendants.jsonl: what was made of a run after it, an export, other weights or a repetition."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, get_args

from pipeline.core.files.real_files import open_unshared
from pipeline.core.files.strict_json import json_text

DESCENDANTS = "descendants.jsonl"
Made = Literal["exported", "converted", "reproduced"]
MOST_BYTES = 1 << 20
"""Bytes of the file that are read: some ten thousand entries."""


@dataclass(frozen=True)
class Descendant:
    """Something that was made of a run."""

    made: Made
    to: str
    """Its path, absolute."""
    at: str = ""
    """Time of it, ISO 8601."""


def note_descendant(run_dir: Path, made: Made, to: Path) -> None:
    """Append what was made of a run; nothing if its directory can't be written."""
    entry = Descendant(made, os.path.abspath(to), time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    with (
        suppress(OSError),
        open(run_dir / DESCENDANTS, "a", encoding="utf-8", opener=open_unshared) as file,
    ):
        file.write(json_text(asdict(entry)) + "\n")


def read_descendants(run_dir: Path) -> Sequence[Descendant]:
    """Read what was made of a run, each path once, in the order of time.

    Other lines are skipped, since the file may be a stranger's.
    """
    file = run_dir / DESCENDANTS
    if not file.is_file():
        return []
    try:
        with file.open("rb") as opened:
            lines = opened.read(MOST_BYTES).decode("utf-8", "replace").splitlines()
    except OSError:
        return []
    descendants: dict[tuple[str, str], Descendant] = {}
    for line in lines:
        try:
            entry = json.loads(line)
            made, to, at = (entry.get(name) for name in ("made", "to", "at"))
        except (ValueError, AttributeError, RecursionError):
            continue
        if made in get_args(Made) and isinstance(to, str):
            descendants[made, to] = Descendant(made, to, at if isinstance(at, str) else "")
    return list(descendants.values())
