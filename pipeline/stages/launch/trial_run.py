"""Trial run: the first steps of a recipe, which measure start, stop and memory for a job file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.config.overrides import get_key
from pipeline.core.errors import RunError, get_exit_status
from pipeline.core.plugins.loading import list_loaded_plugins, to_flags
from pipeline.engine.monitors.live_status import STATUS

POLL_S = 0.05
"""Seconds between two checks for the run's status."""
NO_LOCAL = ("launch.processes=null", "launch.restarts=0", "launch.min_processes=null")
"""Overrides that reset the keys that only `launch=local` may set."""
WITHOUT_EFFECTS = (
    "launch=none",
    *NO_LOCAL,
    "train.resume=null",
    "train.callbacks=[]",
    "checkpoint.prefix=null",
    "checkpoint.directory=null",
)
"""Overrides of a run in one process that writes and reports only in its directory."""


@dataclass(frozen=True)
class TrialRun:
    """Measurements of a run in one process on this machine."""

    start_s: float
    """Seconds until the first steps were done."""
    stop_s: float | None
    """Seconds from the signal until the end, with a checkpoint; None if it ended by itself."""
    memory_bytes: int
    """Peak memory of the process."""


def make_run_arguments(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return a run's arguments: flags of loaded plug-ins, and overrides with `changes` of keys."""
    changed_keys = {get_key(change) for change in changes}
    unchanged = [override for override in overrides if get_key(override) not in changed_keys]
    return [*to_flags([plugin.source for plugin in list_loaded_plugins()]), *unchanged, *changes]


def run_trial(overrides: Sequence[str]) -> TrialRun:
    """Start a run in a temporary folder, and stop it after its first steps. Raises RunError."""
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        arguments = make_run_arguments(overrides, [*WITHOUT_EFFECTS, f"hydra.run.dir={folder}"])
        command = [sys.executable, "-m", "pipeline", *arguments]
        started_at = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                # WNOWAIT leaves the process to `wait4`, which returns its memory.
                options = os.WEXITED | os.WNOHANG | os.WNOWAIT
                status_file = Path(folder, STATUS)
                while not os.waitid(os.P_PID, process.pid, options) and not status_file.exists():
                    time.sleep(POLL_S)
                start_s = time.monotonic() - started_at
                os.kill(process.pid, signal.SIGTERM)
                _, status, usage = os.wait4(process.pid, 0)
                process.returncode = os.waitstatus_to_exitcode(status)
            except BaseException:
                process.kill()
                raise
        stop_s = time.monotonic() - started_at - start_s
    is_stopped = process.returncode == get_exit_status("stopped")
    if not is_stopped and process.returncode != 0:
        raise RunError(f"a run of this recipe ends here with exit status {process.returncode}")
    return TrialRun(start_s, stop_s if is_stopped else None, 1024 * usage.ru_maxrss)
