"""Reader of the status file of a run in progress, for the command `runs`."""

from __future__ import annotations

import math
from datetime import UTC, datetime
from pathlib import Path

from pydantic import TypeAdapter

from pipeline.core.files.bounded_read import read_json
from pipeline.engine.monitors.live_status import STATUS, LiveStatus

LIVE_S = 60.0
"""Age of a status above which its run counts as dead: a minute, as a single step may take long."""


def read_live_status(run_dir: Path) -> LiveStatus | None:
    """Read the status of a run; None if it has none, or none within `LIVE_S`.

    Raises OSError and ValueError if the file can't be read or isn't valid.
    """
    try:
        status = TypeAdapter(LiveStatus).validate_python(read_json(run_dir / STATUS))
    except FileNotFoundError:
        return None
    if math.isnan(status.left_s):
        raise ValueError("left_s = nan: must be a number")
    written = datetime.fromisoformat(status.written)
    if written.tzinfo is None:
        raise ValueError(f"written = {status.written}: must have a time zone")
    return status if abs((datetime.now(UTC) - written).total_seconds()) < LIVE_S else None
