"""A run in several processes on this machine: started, watched, started again if one of them dies,
and ended together."""

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
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.checkpoint.restore import FOLDER, list_saved_steps
from pipeline.config.checks import fit_to_processes
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.host.launchers import LAUNCHERS
from pipeline.core.host.signals import STOP, Signals, handle_signals
from pipeline.core.reporter import Reporter
from pipeline.stages.launch.join import LOCAL
from pipeline.stages.record import run_directory
from pipeline.stages.record.run_directory import RANKS, SUMMARY
from pipeline.stages.record.summary import Summary, read_summary
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.open_run import advise_to_resume, convert_os_errors, place_run
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.parallel_spec import LaunchSpec
from pipeline.training.parallel.ranks import PeerGoneError, Ranks

WORKER = "pipeline.cli.worker"
"""Module that each process runs, with the folder of the request as its argument."""
REQUEST = "request.json"
POLL_S = 0.05
"""Seconds between two checks of the processes."""
GRACE_S = 3.0
"""Seconds in which the other processes must end after one was killed."""

Workers = Sequence[subprocess.Popen[bytes]]


@dataclass(frozen=True)
class Failure:
    """The failure of a process."""

    rank: int
    reason: str
    status: int = 1
    is_peer_error: bool = False
    """Whether the process failed because another process has ended."""
    message: str | None = None
    """The error that the process has written; None without one."""
    is_interrupted: bool = False
    """Whether a signal to stop has ended the process before it could save."""


class ProcessError(PipelineError):
    """The error of the process that failed first, with its exit status."""

    def __init__(self, message: str, failure: Failure) -> None:
        super().__init__(message)
        self.exit_status = failure.status
        self.is_death = failure.message is None
        """Whether the process died or hung without an error of its program."""


def run_locally(
    request: Mapping[str, Any], run_dir: Path, signals: Signals, launch: LaunchSpec
) -> Summary:
    """Run `request`, a JSON object, in several processes; return the summary of the first process.

    The first process prints the lines of the run; other output goes to `ranks/N.log` in the run
    directory. Signals to this process are passed to the first process. Once a process has ended,
    the others must end within `launch.end_seconds`. Raises the error of the process that failed
    first, and Interrupted if a signal has ended the processes before they could conclude.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / REQUEST).write_text(json.dumps(request))
        with _start_workers(launch, folder, run_dir) as workers, signals.hold_stops():
            failure = _watch(workers, folder, signals, launch)
            running = [rank for rank, worker in enumerate(workers) if worker.poll() is None]
        if failure is not None and failure.is_interrupted:
            signals.check()  # raises Interrupted
        if failure is None and running:
            failure = Failure(running[0], f"did not end within {launch.end_seconds:g} s")
        elif failure is not None and failure.is_peer_error and running:
            failure = Failure(running[0], "did not answer")
        if failure is not None:
            if failure.rank == 0 and failure.message:
                raise ProcessError(failure.message, failure)
            process = f"process {failure.rank} of {launch.num_processes}"
            log = run_dir / RANKS / f"{failure.rank}.log"
            raise ProcessError(f"{process} {failure.reason}; log: {log}", failure)
        if not (folder / SUMMARY).exists():
            signals.check()
        return read_summary(folder)


@contextmanager
def _start_workers(launch: LaunchSpec, folder: Path, run_dir: Path) -> Iterator[Workers]:
    """Start the processes, and end those that still run when the body ends."""
    (run_dir / RANKS).mkdir(exist_ok=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    with ExitStack() as stack:
        workers = []
        for rank in range(launch.num_processes):
            log = stack.enter_context((run_dir / RANKS / f"{rank}.log").open("ab"))
            worker = subprocess.Popen(
                [sys.executable, "-m", WORKER, str(folder)],
                stdin=subprocess.DEVNULL,
                stdout=log if rank else None,
                stderr=log,
                env=make_environment(os.environ, rank, launch.num_processes, port),
                process_group=0,
            )
            stack.callback(_kill, worker)
            workers.append(worker)
        yield workers


def make_environment(
    inherited: Mapping[str, str], rank: int, size: int, port: int
) -> dict[str, str]:
    """Return the variables of process `rank` of `size` processes that meet at a port.

    Variables that a launcher has set for this process are left out.
    """
    names = {name for row in LAUNCHERS if row.name == "env" for name in row.variables}
    return {
        **{name: value for name, value in inherited.items() if name not in names},
        LOCAL: "1",
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def _kill(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        worker.kill()
        worker.wait()


def _watch(workers: Workers, folder: Path, signals: Signals, launch: LaunchSpec) -> Failure | None:
    """Wait until all end, at most `launch.end_seconds` after the first; return the first cause."""
    failure = None
    is_stopped = False
    # Earlier requests to save weren't for these processes.
    saves = signals.saves
    ended_at = None
    while any(worker.poll() is None for worker in workers):
        if signals.stop and not is_stopped:
            is_stopped = True
            workers[0].send_signal(signal.SIGTERM)
        if signals.saves > saves:
            saves = signals.saves
            workers[0].send_signal(signal.SIGUSR1)
        failure = failure or _find_first_failure(workers, folder)
        if ended_at is None and any(worker.poll() is not None for worker in workers):
            ended_at = time.monotonic()
        # After a process was killed, the others can't save anything, so they get less time.
        is_killed = failure is not None and failure.message is None
        limit_s = GRACE_S if is_killed else launch.end_seconds
        if ended_at is not None and time.monotonic() > ended_at + limit_s:
            break
        time.sleep(POLL_S)
    failure = _find_first_failure(workers, folder)
    # A scheduler signals every process, so the first may end while others wait for it.
    is_stop = signals.stop and failure is not None and failure.is_peer_error
    return None if is_stop else failure


def _find_first_failure(workers: Workers, folder: Path) -> Failure | None:
    """Return the failure that caused the other failures; None if no process has failed."""
    results = [_read_failure(rank, worker, folder) for rank, worker in enumerate(workers)]
    failures = [failure for failure in results if failure is not None]
    return min(failures, key=lambda failure: (failure.is_peer_error, failure.rank), default=None)


def _read_failure(rank: int, worker: subprocess.Popen[bytes], folder: Path) -> Failure | None:
    """Return the failure of a process; None if it runs, or has ended without one."""
    status = worker.poll()
    if status is None:
        return None
    if status < 0:
        reason = f"was ended by {signal.Signals(-status).name}"
        is_interrupted = -status in STOP
        # JAX aborts a process that gets no messages from other processes.
        is_peer_error = status == -signal.SIGABRT
        return Failure(rank, reason, is_peer_error=is_peer_error, is_interrupted=is_interrupted)
    peer_error = folder / f"peer_error_{rank}"
    if peer_error.exists():
        return Failure(rank, f"has failed: {peer_error.read_text()}", is_peer_error=True)
    error = folder / f"error_{rank}"
    if error.exists():
        message = error.read_text(errors="replace")
        return Failure(rank, f"has failed: {message}", status or 1, message=message)
    if (folder / f"end_{rank}").exists():
        return None
    reason = f"has ended with exit status {status} before it ran"
    return Failure(rank, reason, status or 1, is_interrupted=status == os.EX_TEMPFAIL)


def note_end(folder: Path, rank: int) -> None:
    """Write the file that shows that a process has ended without a failure."""
    (folder / f"end_{rank}").touch()


def write_error(folder: Path, rank: int, error: BaseException) -> None:
    """Write the error of a process for the process that started it."""
    name = "peer_error" if isinstance(error, PeerGoneError) else "error"
    (folder / f"{name}_{rank}").write_text(str(error) or type(error).__name__)


def run_in_processes(recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary:
    """Run in several processes on this machine; return the summary of the first process.

    Every process calls `run`. After the death of a process, they are started again from the last
    checkpoint, up to `launch.restarts` times. Raises the error of the process that failed first,
    and RecipeError for a pruner or callbacks, which the other processes don't have.
    """
    if options.pruner is not None:
        raise RecipeError("launch = local: must be none in a sweep that prunes its trials")
    if options.callbacks:
        problem = "must be none with callbacks from Python; name them in train.callbacks"
        raise RecipeError(f"launch = local: {problem}")
    fitted, folder = place_run(recipe, options, features, Ranks(), recipe.launch.num_processes)
    run_dir = folder.path
    if folder.resuming:
        with convert_os_errors(run_dir):
            run_directory.require_own(run_dir)
    request = {
        "recipe": _make_worker_tree(fitted, run_dir if folder.resuming else None),
        "run_dir": str(run_dir),
        "recipe_folder": None if options.recipe_folder is None else str(options.recipe_folder),
        "changed": dict(options.changed),
        # All processes of a machine have the same clock.
        "started_at": options.started_at,
        "parent": os.getpid(),
    }
    try:
        with handle_signals(options.signals):
            summary = _run_with_restarts(fitted, request, run_dir, options.signals)
    except BaseException:
        if list_saved_steps(run_dir / FOLDER):
            advise_to_resume(fitted, options, run_dir, Reporter())
        raise
    if summary.status == "stopped":
        advise_to_resume(fitted, options, run_dir, Reporter())
    return summary


def _run_with_restarts(
    recipe: Recipe, request: Mapping[str, Any], run_dir: Path, signals: Signals
) -> Summary:
    """Run the processes of a request, and start them again if one of them dies."""
    restarts = recipe.launch.restarts
    for number in count(1):
        try:
            return run_locally(request, run_dir, signals, recipe.launch)
        except ProcessError as error:
            if number > restarts or signals.stop or not error.is_death:
                raise
            resumed = run_dir if (run_dir / run_directory.RECIPE).exists() else None
            restores = recipe.checkpoint.restore is not None
            # Resumed without a checkpoint, a run would begin with fresh weights.
            if resumed and restores and not list_saved_steps(run_dir / FOLDER):
                raise
            recipe = _leave_out_process(recipe)
            processes = recipe.launch.num_processes
            text = f"restart {number} of {restarts} in {processes} of the processes: {error}"
            Reporter().warn(text)
            request = {**request, "recipe": _make_worker_tree(recipe, resumed)}
    raise AssertionError("the last attempt returns or raises")


def _leave_out_process(recipe: Recipe) -> Recipe:
    """Return the recipe with the largest smaller number of processes that it allows.

    Each process has the number of devices that it had. Returns `recipe` if fewer aren't allowed.
    """
    num_before = recipe.launch.num_processes
    least = recipe.launch.min_processes or num_before
    devices_per_process = recipe.parallel.num_devices // num_before
    for processes in range(num_before - 1, least - 1, -1):
        launch = recipe.launch.model_copy(update={"processes": processes})
        layout = {"devices": processes * devices_per_process, "mesh": None}
        parallel = recipe.parallel.model_copy(update=layout)
        with suppress(RecipeError):
            changed = recipe.model_copy(update={"launch": launch, "parallel": parallel})
            return fit_to_processes(changed, processes)
    return recipe


def _make_worker_tree(recipe: Recipe, resumed: Path | None) -> dict[str, Any]:
    """Return the processes' recipe as JSON: it resumes the run in `resumed`, or begins a run."""
    tree = recipe.whole_tree()
    tree["train"]["resume"] = None if resumed is None else str(resumed)
    if resumed is not None:
        # Checkpoints have the weights that the run began with.
        tree["checkpoint"]["restore"] = None
    return tree


class LocalRun(RunFeature):
    """The processes of a run with `launch = local`."""

    def launch(self, recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary | None:
        """Run in several processes; None in one of them."""
        return None if LOCAL in os.environ else run_in_processes(recipe, options, features)
