"""A run of a recipe that is stopped after its first steps, for the times and memory of a job."""

from __future__ import annotations

import resource
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
"""Overrides that a recipe needs unless it has `launch=local`."""
WITHOUT_EFFECTS = (
    "launch=none",
    *NO_LOCAL,
    "train.resume=null",
    "train.callbacks=[]",
    "checkpoint.prefix=null",
    "checkpoint.directory=null",
)
"""Overrides of a run in one process that changes no other files, and is logged nowhere else."""


@dataclass(frozen=True)
class TrialRun:
    """Measurements of a run in one process on this machine."""

    start_s: float
    """Seconds until the first steps were done."""
    stop_s: float | None
    """Seconds from the signal until the end, with a checkpoint; None if it ended by itself."""
    memory_bytes: int
    """Peak memory of the process."""


def replace_overrides(overrides: Sequence[str], changes: Sequence[str]) -> list[str]:
    """Return the arguments of a run with other values of keys, and with the loaded plug-ins."""
    changed_keys = {get_key(change) for change in changes}
    unchanged = [override for override in overrides if get_key(override) not in changed_keys]
    return [*to_flags([plugin.source for plugin in list_loaded_plugins()]), *unchanged, *changes]


def run_trial(overrides: Sequence[str]) -> TrialRun:
    """Start a run in a temporary folder, and stop it after its first steps. Raises RunError."""
    with tempfile.TemporaryDirectory(prefix="trial-") as folder:
        arguments = replace_overrides(overrides, [*WITHOUT_EFFECTS, f"hydra.run.dir={folder}"])
        command = [sys.executable, "-m", "pipeline", *arguments]
        started_at = time.monotonic()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            try:
                while process.poll() is None and not (Path(folder) / STATUS).exists():
                    time.sleep(POLL_S)
                start_s = time.monotonic() - started_at
                process.terminate()
                process.wait()
            except BaseException:
                process.kill()
                raise
        stop_s = time.monotonic() - started_at - start_s
    is_stopped = process.returncode == get_exit_status("stopped")
    if not is_stopped and process.returncode != 0:
        raise RunError(f"a run of this recipe ends here with exit status {process.returncode}")
    peak_kib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    return TrialRun(start_s, stop_s if is_stopped else None, 1024 * peak_kib)
