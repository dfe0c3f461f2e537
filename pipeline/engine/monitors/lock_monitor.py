"""Lock monitor: checks a run's lock while the run goes on."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import RunError
from pipeline.core.files.folder_lock import Lock
from pipeline.engine.callbacks.events import Monitor


class LockMonitor(Monitor):
    """Check, before lines are written, that no other process has entered the run.

    The first of the monitors, since it is flushed before the logs. Raises RunError where the lock
    was removed and another process holds it now.
    """

    def __init__(self, run_dir: Path, lock: Lock) -> None:
        self._run_dir, self._lock = run_dir, lock

    def flush(self) -> None:
        """Check the lock, and take it again where its file was removed."""
        # Where the file can't be created again, no other process can create it either; and a
        # directory that is gone is reported by the log.
        with suppress(OSError):
            if not self._lock.keep():
                raise RunError(
                    f"{self._run_dir}: another process is writing this run since its lock was "
                    "removed; this one ends here"
                )
