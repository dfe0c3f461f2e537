"""Storage of a study for any number of processes, with heartbeats that detect dead processes.

The default is Optuna's journal, a file in the sweep's directory; a URL names a database. Running
trials send heartbeats. Optuna has heartbeats for databases only. For a journal, a heartbeat touches
a file of its trial. To find old heartbeats, another file is touched and the times are compared, so
that only the file server's clock matters.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import optuna
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, Trial, TrialState

from pipeline.core.errors import RunError, first_line, printable_lines
from pipeline.core.files.folder_lock import Lock
from pipeline.study.sweep.directory import BEATS, JOURNAL, JOURNAL_LOCK

MAX_JOURNAL_BYTES = 2**30
"""Largest journal, which every process of a study reads: some million reports of trials."""
GRACE_BEATS = 3
"""Number of missed heartbeats after which a trial counts as dead."""
StaleCallback = Callable[[optuna.Study, FrozenTrial], None]


class FileLock(BaseJournalFileLock):
    """A lock that the kernel releases when its process dies. Optuna's would remain for 30 s."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock(path)

    def acquire(self) -> bool:
        return self._lock.acquire(wait=True)

    def release(self) -> None:
        self._lock.release()


class BeatingJournal(JournalStorage, BaseHeartbeat):
    """Optuna's journal with heartbeats: a file per trial, touched at every heartbeat."""

    def __init__(self, folder: Path, interval_s: int, callback: StaleCallback) -> None:
        self._beats = folder / BEATS
        self._interval_s = interval_s
        self._callback = callback
        self._beats.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / JOURNAL_LOCK)
        super().__init__(JournalFileBackend(str(folder / JOURNAL), lock))

    def record_heartbeat(self, trial_id: int) -> None:
        (self._beats / str(trial_id)).touch()

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        probe = self._beats / "now"
        probe.touch()
        oldest_s = probe.stat().st_mtime - GRACE_BEATS * self._interval_s
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        return [trial._trial_id for trial in running if self._read_last_beat_s(trial) < oldest_s]

    def _read_last_beat_s(self, trial: FrozenTrial) -> float:
        """Return the time of a trial's last heartbeat in s; infinite, so not stale, without one."""
        try:
            return (self._beats / str(trial._trial_id)).stat().st_mtime
        except FileNotFoundError:
            return math.inf

    def get_heartbeat_interval(self) -> int:
        return self._interval_s

    def get_heartbeat_stale_trial_callback(self) -> StaleCallback:
        """Return the function that Optuna calls for a dead trial."""
        return self._callback


def open_storage(url: str | None, sweep_dir: Path, interval_s: int, max_retry: int) -> BaseStorage:
    """Open the journal in a sweep's directory, or the database that a URL names.

    Dead trials are queued again, at most `max_retry` times each. Raises RunError if the journal or
    the database can't be opened.
    """
    _silence_optuna()
    retry = RetryHeartbeatStaleTrialCallback(max_retry=max_retry)
    try:
        if url is None:
            journal = sweep_dir / JOURNAL
            if journal.exists() and not journal.is_file():
                raise ValueError("must be a regular file")
            if journal.exists() and journal.stat().st_size > MAX_JOURNAL_BYTES:
                # Every process would read the whole file.
                raise ValueError(
                    f"must have at most {MAX_JOURNAL_BYTES:,} bytes; a database can have more"
                )
            return BeatingJournal(sweep_dir, interval_s, retry)
        return RDBStorage(
            url,
            heartbeat_interval=interval_s,
            grace_period=GRACE_BEATS * interval_s,
            heartbeat_stale_trial_callback=retry,
        )
    except Exception as error:  # a wrong URL, an unreachable server, a file that isn't a journal
        source = sweep_dir / JOURNAL if url is None else f"hydra.sweeper.storage = {url}"
        raise RunError(f"{source}: can't open the study: {first_line(error)}") from error


def _silence_optuna() -> None:
    """Hide Optuna's log below warnings, and its warnings of experimental features and heartbeats.

    Optuna warns that only `Study.optimize` sends heartbeats, but `send_heartbeats` sends them here.
    """
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", "Heartbeat of storage is supposed", UserWarning)


@contextmanager
def send_heartbeats(storage: BaseHeartbeat, trials: Sequence[Trial]) -> Iterator[None]:
    """Send the heartbeats of trials to `storage` during the body, the first one immediately."""
    interval_s = storage.get_heartbeat_interval()
    ended = threading.Event()

    def beat() -> None:
        for trial in trials:
            storage.record_heartbeat(trial._trial_id)

    def keep_beating() -> None:
        while not ended.wait(interval_s):
            try:
                beat()
            except Exception as error:  # a server that is unreachable for a while
                warning = f"warning: a heartbeat could not be recorded: {error}"
                print(printable_lines(warning), flush=True)

    beat()
    thread = threading.Thread(target=keep_beating, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
