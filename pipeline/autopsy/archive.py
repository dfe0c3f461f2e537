"""The autopsy of a run that was taken up since: put where it is not taken for one of this life.

A run directory holds nothing of steps behind the one that its run went on from. An autopsy may be
of such a step, which can turn out well this time (it was a fault of the machine, or of code that
was mended since); so it gets a folder of its own, where the newest is kept.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from pipeline.runner.record.run_directory import AUTOPSY, EARLIER_AUTOPSY, REPRODUCER


def set_aside_autopsy(run_dir: Path) -> Path | None:
    """Move what an autopsy has left in a run directory; the folder, or None where there was none.

    `python -m pipeline autopsy` takes that folder as it takes a run directory. Raises OSError.
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
