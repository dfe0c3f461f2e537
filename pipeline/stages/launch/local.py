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
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.core.errors import PipelineError
from pipeline.core.host.signals import Signals
from pipeline.stages.launch.join import LOCAL
from pipeline.stages.record.run_directory import RANKS
from pipeline.stages.record.summary import Summary, read_summary
from pipeline.training.parallel.ranks import PeerGoneError

WORKER = "pipeline.cli.processes.worker"
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


@dataclass(frozen=True)
class Failure:
    """A process that failed, and how."""

    rank: int
    reason: str
    status: int = 1
    is_of_a_peer: bool = False
    """Whether it failed for want of another process."""
    own_error: str | None = None


def run_locally(
    request: Mapping[str, Any], run_dir: Path, signals: Signals, size: int, end_s: float
) -> Summary:
    """Run `request`, JSON, in `size` processes, and return when all have ended.

    The first one prints what a run prints; all else goes to `ranks/N.log` in the run directory.
    A signal to this process goes to the first one. `end_s` is how long the others may take to end
    once one has. Returns the first one's summary. Raises the error of the process that failed
    first.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        with _started(size, folder, run_dir) as processes, signals.held():
            failed = _watch(processes, folder, signals, end_s)
            silent = [rank for rank, each in enumerate(processes) if each.poll() is None]
        if failed is None and silent:
            failed = Failure(silent[0], f"did not end within {end_s:g} s")
        elif failed is not None and failed.is_of_a_peer and silent:
            failed = Failure(silent[0], "did not answer")
        if failed is not None:
            if failed.rank == 0 and failed.own_error:
                raise ProcessError(failed.own_error, failed.status)
            log = run_dir / RANKS / f"{failed.rank}.log"
            raise ProcessError(
                f"process {failed.rank} of {size} {failed.reason}; log: {log}", failed.status
            )
        return read_summary(folder)


@contextmanager
def _started(size: int, folder: Path, run_dir: Path) -> Iterator[Processes]:
    """Start the processes; whatever happens, none is left running."""
    (run_dir / RANKS).mkdir(exist_ok=True)
    place = {
        LOCAL: "1",
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
    }
    with ExitStack() as stack:
        processes = []
        for rank in range(size):
            log = stack.enter_context((run_dir / RANKS / f"{rank}.log").open("ab"))
            process = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log if rank else None,
                stderr=log,
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


def _watch(processes: Processes, folder: Path, signals: Signals, end_s: float) -> Failure | None:
    """Wait until all have ended, or some time after the first has; return what failed first."""
    failed, stopped, saves, ended_at = None, False, 0, None
    while any(process.poll() is None for process in processes):
        if signals.stop and not stopped:
            stopped = True
            processes[0].send_signal(signal.SIGTERM)
        if signals.saves > saves:
            saves = signals.saves
            processes[0].send_signal(signal.SIGUSR1)
        failed = failed or _first_failure(processes, folder)
        if ended_at is None and any(process.poll() is not None for process in processes):
            ended_at = time.monotonic()
        # A process with an error of its own may have something to save still, as the others have.
        at_once = failed is not None and failed.own_error is None
        if ended_at is not None and time.monotonic() > ended_at + (GRACE_S if at_once else end_s):
            break
        time.sleep(POLL_S)
    failed = _first_failure(processes, folder)
    # The first one leaves at once where a signal finds it outside of training.
    return None if stopped and failed is not None and failed.is_of_a_peer else failed


def _first_failure(processes: Processes, folder: Path) -> Failure | None:
    """Return the failure that made others fail: a process that was killed, before one with an error
    of its own, before one that misses another."""
    failures = [_failure_of(rank, process, folder) for rank, process in enumerate(processes)]
    there = [failure for failure in failures if failure is not None]
    return min(there, key=lambda failure: (failure.is_of_a_peer, failure.rank), default=None)


def _failure_of(rank: int, process: subprocess.Popen[bytes], folder: Path) -> Failure | None:
    """Return how a process has failed; None where it runs, is done or was stopped in order."""
    status = process.poll()
    own, of_a_peer = _error_file(folder, rank), _error_file(folder, rank, of_a_peer=True)
    if status is None:
        return None
    if status < 0:
        # JAX aborts a process that hears nothing of the others.
        reason = f"was ended by {signal.Signals(-status).name}"
        return Failure(rank, reason, is_of_a_peer=status == -signal.SIGABRT)
    if of_a_peer.exists():
        return Failure(rank, f"has failed: {of_a_peer.read_text()}", is_of_a_peer=True)
    if not own.exists():
        if _end_file(folder, rank).exists():
            return None
        return Failure(rank, f"has ended with exit status {status} before it ran", status or 1)
    text = own.read_text(errors="replace")
    return Failure(rank, f"has failed: {text}", status or 1, own_error=text)


def _error_file(folder: Path, rank: int, *, of_a_peer: bool = False) -> Path:
    return folder / f"{'peer_error' if of_a_peer else 'error'}_{rank}"


def _end_file(folder: Path, rank: int) -> Path:
    return folder / f"end_{rank}"


def note_end(folder: Path, rank: int) -> None:
    """Say that a process has ended in order, done or stopped."""
    _end_file(folder, rank).touch()


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Leave the error of a process where the one that started it looks."""
    file = _error_file(folder, rank, of_a_peer=isinstance(error, PeerGoneError))
    file.write_text(str(error) or type(error).__name__)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port
