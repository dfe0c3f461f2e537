"""Several processes of a run on this machine: started, watched, and ended together."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.host.signals import Signals
from pipeline.parallel.launch_spec import LaunchSpec
from pipeline.parallel.ranks import PeerGoneError
from pipeline.runner.record.run_directory import RANKS

DEFAULT_PROCESSES = 2
WORKER = "pipeline.runner.worker"
"""Module that a process runs, with the folder of the request as its argument."""
REQUEST = "request.json"
POLL_S = 0.05
GRACE_S = 3.0
"""How long processes may take to end by themselves once another one has failed."""

Processes = Sequence[subprocess.Popen[bytes]]


class ProcessError(PipelineError):
    """The error of the process that failed first; the exit status is its own."""

    def __init__(self, message: str, exit_status: int) -> None:
        super().__init__(message)
        self.exit_status = exit_status


def run_locally(
    launch: LaunchSpec, request: Mapping[str, Any], run_dir: Path, signals: Signals
) -> None:
    """Run `request`, JSON, in several processes, and return when all have ended.

    The first one prints what a run prints; the others write to `ranks/N.log` in the run directory.
    A signal to this process goes to the first one. Raises the error of the process that failed
    first.
    """
    size = launch.processes or DEFAULT_PROCESSES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        with _started(size, folder, run_dir) as processes, signals.held():
            failed = _watch(processes, folder, signals, launch.end_seconds)
        if failed is not None:
            raise _error_of(failed, processes, folder, run_dir)


@contextmanager
def _started(size: int, folder: Path, run_dir: Path) -> Iterator[Processes]:
    """Start the processes; whatever happens, none is left running."""
    (run_dir / RANKS).mkdir(exist_ok=True)
    place = {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            output = None
            if rank:
                output = stack.enter_context((run_dir / RANKS / f"{rank}.log").open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={**os.environ, **place, "RANK": str(rank)},
                process_group=0,
            )
            stack.callback(_kill, process)
            processes.append(process)
        yield processes


def _kill(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.kill()
        process.wait()


def _watch(processes: Processes, folder: Path, signals: Signals, end_s: float) -> int | None:
    """Wait until all have ended, or some time after the first has; return which failed first."""
    failed, stopped, saves, deadline = None, False, 0, None
    while any(process.poll() is None for process in processes):
        if signals.stop and not stopped:
            stopped = True
            processes[0].send_signal(signal.SIGTERM)
        if signals.saves > saves:
            saves = signals.saves
            processes[0].send_signal(signal.SIGUSR1)
        if failed is None:
            failed = _first_failed(processes, folder)
        if deadline is None and any(process.poll() is not None for process in processes):
            deadline = time.monotonic() + (GRACE_S if failed is not None else end_s)
        if deadline is not None and time.monotonic() > deadline:
            break
        time.sleep(POLL_S)
    return _first_failed(processes, folder) if failed is None else failed


def _first_failed(processes: Processes, folder: Path) -> int | None:
    """Return the process whose failure made others fail: a killed one before one with an error of
    its own, before one that misses another."""
    found = []
    for rank, process in enumerate(processes):
        status = process.poll()
        if status is None or (status >= 0 and not _error_file(folder, rank).exists()):
            continue
        causes = (-signal.SIGABRT, PeerGoneError.exit_status)
        weight = 2 if status in causes else 0 if status < 0 else 1
        found.append((weight, rank))
    return min(found)[1] if found else None


def _error_of(failed: int, processes: Processes, folder: Path, run_dir: Path) -> ProcessError:
    status = processes[failed].returncode
    log = f"; its log is {run_dir / RANKS / f'{failed}.log'}" if failed else ""
    whose = f"process {failed} of {len(processes)}"
    file = _error_file(folder, failed)
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        return ProcessError(f"{whose} was ended by {name}, and the others with it{log}", 1)
    text = file.read_text(errors="replace") if file.exists() else "ended without saying why"
    if status == PeerGoneError.exit_status:
        status = 1
    return ProcessError(text if failed == 0 else f"{whose}: {text}{log}", status or 1)


def _error_file(folder: Path, rank: int) -> Path:
    return folder / f"error_{rank}"


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Leave the error of a process where the one that started it looks."""
    _error_file(folder, rank).write_text(str(error) or type(error).__name__)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
