"""Archive for the autopsy of a non-finite step, when its run is resumed.

A resumed run repeats the steps after its checkpoint, so the run directory must have no record of
them. The step of an autopsy may be repeated too, and may succeed, for example after code was fixed.
So the autopsy is moved to an archive folder, where it replaces an earlier one.
"""

from __future__ import annotations

import shutil
from pathlib import Path

AUTOPSY = "autopsy.json"
"""File of the findings about a non-finite step that ended the run."""
REPRODUCER = "reproducer"
"""Folder with the files that repeat that step."""
EARLIER_AUTOPSY = "earlier_autopsy"
"""Archive folder, with the `AUTOPSY` and `REPRODUCER` that the run had when it was resumed."""


def set_aside_autopsy(run_dir: Path) -> Path | None:
    """Move an autopsy into the archive, and return the archive folder; None without an autopsy.

    `python -m pipeline autopsy` accepts that folder like a run directory. Raises OSError.
    """
    paths = [run_dir / name for name in (AUTOPSY, REPRODUCER) if (run_dir / name).exists()]
    if not paths:
        return None
    folder = run_dir / EARLIER_AUTOPSY
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in paths:
        path.rename(folder / path.name)
    return folder
