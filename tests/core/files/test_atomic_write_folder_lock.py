from __future__ import annotations

import multiprocessing
import os
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path

import pytest

from pipeline.core.files.atomic_write import (
    LOCK,
    Lock,
    lock_descriptor,
    lock_file,
    lock_folder,
    try_lock_folder,
)

SPAWN = multiprocessing.get_context("spawn")


def test_lock_has_one_holder(tmp_path: Path) -> None:
    file = tmp_path / "lock"
    with lock_file(file, wait=False) as first:
        assert first is not None
        with lock_file(file, wait=False) as second:
            assert second is None
    with lock_file(file, wait=False) as third:
        assert third is not None


def test_owned_folder_remains_owned_without_its_lock_file(tmp_path: Path) -> None:
    """The lock was on a file; who removed it could write the same run."""
    with try_lock_folder(tmp_path) as first:
        assert first is not None
        (tmp_path / LOCK).unlink()
        with try_lock_folder(tmp_path) as second:
            assert second is None
        assert first.keep()
        assert (tmp_path / LOCK).exists()
    with try_lock_folder(tmp_path) as third:
        assert third is not None


def test_removed_lock_file_is_locked_again(tmp_path: Path) -> None:
    """As on a network file system, where the folder's lock is this machine's alone."""
    first, second = Lock(tmp_path / LOCK), Lock(tmp_path / LOCK)
    assert first.acquire(wait=False)
    (tmp_path / LOCK).unlink()
    assert first.keep()
    assert not second.acquire(wait=False)
    first.release()


@pytest.mark.parametrize("replaced", [False, True])
def test_holder_notices_lock_taken_by_another_process(tmp_path: Path, replaced: bool) -> None:
    first, second = Lock(tmp_path / LOCK), Lock(tmp_path / LOCK)
    assert first.acquire(wait=False)
    if replaced:
        (tmp_path / "other").touch()
        (tmp_path / "other").replace(tmp_path / LOCK)
    else:
        (tmp_path / LOCK).unlink()
    assert second.acquire(wait=False)
    assert not first.keep()
    second.release()
    assert first.keep()
    first.release()


@pytest.mark.medium
def test_lock_file_removed_during_wait_is_recreated(
    tmp_path: Path,
) -> None:
    """Else the waiter would hold a file that nobody finds."""
    holder = Lock(tmp_path / LOCK)
    assert holder.acquire(wait=True)
    process = SPAWN.Process(target=_wait_and_mark, args=(tmp_path,))
    process.start()
    while not (tmp_path / "waits").exists():
        process.join(0.01)
    (tmp_path / LOCK).unlink()
    holder.release()
    process.join(30)
    assert (process.exitcode, (tmp_path / LOCK).exists()) == (0, True)


def _wait_and_mark(folder: Path) -> None:
    import pipeline.core.files.atomic_write as module

    def look(descriptor: int, *, wait: bool) -> bool:
        (folder / "waits").touch()
        return lock_descriptor(descriptor, wait=wait)

    module.lock_descriptor = look
    lock = Lock(folder / LOCK)
    assert lock.acquire(wait=True)
    assert os.path.samestat(os.stat(folder / LOCK), os.fstat(lock._descriptor))


@pytest.mark.parametrize("kind", ["link", "dangling", "pipe", "folder"])
def test_non_regular_file_is_not_locked(kind: str, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    lock = tmp_path / LOCK
    if kind == "link":
        elsewhere.touch()
    {
        "link": lambda: lock.symlink_to(elsewhere),
        "dangling": lambda: lock.symlink_to(elsewhere),
        "pipe": lambda: os.mkfifo(lock),
        "folder": lock.mkdir,
    }[kind]()
    with pytest.raises(OSError, match=r"link|regular|directory"), lock_folder(tmp_path):
        pass
    assert elsewhere.exists() is (kind == "link")


@pytest.mark.slow
def test_one_of_several_simultaneous_processes_owns_the_folder(tmp_path: Path) -> None:
    start, end = SPAWN.Barrier(4), SPAWN.Event()
    processes = [SPAWN.Process(target=_own, args=(tmp_path, start, end)) for _ in range(4)]
    for process in processes:
        process.start()
    while len(list(tmp_path.glob("tried-*"))) < 4:
        processes[0].join(0.01)
    end.set()
    for process in processes:
        process.join(30)
    assert sorted(process.exitcode or 0 for process in processes) == [0, 1, 1, 1]


def _own(folder: Path, start: Barrier, end: Event) -> None:
    start.wait()
    with try_lock_folder(folder) as lock:
        (folder / f"tried-{os.getpid()}").touch()
        if lock is None:
            raise SystemExit(1)
        end.wait()
