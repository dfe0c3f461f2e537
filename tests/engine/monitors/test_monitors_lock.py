from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import LOCK, Lock
from pipeline.engine.monitors.monitors import LockMonitor


def test_run_ends_if_another_process_takes_its_lock(tmp_path: Path) -> None:
    """On a network file system, where no lock outlives its file; before a line is written."""
    own, other = Lock(tmp_path / LOCK), Lock(tmp_path / LOCK)
    assert own.acquire(wait=False)
    monitor = LockMonitor(tmp_path, own)
    monitor.flush()
    (tmp_path / LOCK).unlink()
    assert other.acquire(wait=False)
    with pytest.raises(RunError, match=re.escape(f"{tmp_path}: another process is writing")):
        monitor.flush()
    other.release()
    monitor.flush()
    own.release()


def test_removed_directory_is_ignored_by_the_lock_monitor(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    own = Lock(tmp_path / "run" / LOCK)
    assert own.acquire(wait=False)
    shutil.rmtree(tmp_path / "run")
    LockMonitor(tmp_path / "run", own).flush()
    own.release()
