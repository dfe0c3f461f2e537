"""Archive of the autopsy of a run that was resumed since.

A run directory holds no records of steps after the one that its run resumed from. An autopsy may be
of such a step, which can succeed this time (the machine was at fault, or code that has been fixed).
So it is moved to another folder, which holds the newest.
"""

from __future__ import annotations

import shutil
from pathlib import Path

AUTOPSY = "autopsy.json"
REPRODUCER = "reproducer"
"""The findings about a non-finite step that ended the run, and the files that repeat it."""
EARLIER_AUTOPSY = "earlier_autopsy"
"""Both, of the last non-finite step that ended the run before it was resumed."""


def set_aside_autopsy(run_dir: Path) -> Path | None:
    """Move an autopsy's files out of a run directory; return their folder, None without any.

    `python -m pipeline autopsy` accepts that folder like a run directory. Raises OSError.
    """
    left = [path for name in (AUTOPSY, REPRODUCER) if (path := run_dir / name).exists()]
    if not left:
        return None
    folder = run_dir / EARLIER_AUTOPSY
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in left:
        path.rename(folder / path.name)
    return folder
