"""An object store in memory, and processes that stop before each of their operations there."""

from __future__ import annotations

import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipeline.core.files.storage import Storage

ROOT = "m"
URL = "memory://m"
SLOWEST_S = 60.0
"""Seconds after which a process that neither stops nor ends is a failure of the test."""
FAULTS = ("none", "refused", "no reply", "half", "late")
"""What may happen to an operation: nothing; it fails; it succeeds, and the client gets an error; it
is done in part, with an error; it fails for the client, and is done at a later moment."""


class KilledError(BaseException):
    """The end of a process that is killed."""


class MemoryStore:
    """The files of a store by path, and operations that are still under way."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.version = 0
        """A number that grows with every change."""
        self.late: list[Callable[[], None]] = []

    def land(self) -> None:
        """Do the operations that are under way, the last one first."""
        while self.late:
            self.late.pop()()


class MemorySystem:
    """A file system of fsspec, of a store. `wait` is called before each part of an operation.

    It returns the fault of an operation, and of later parts "none". Listing takes folder by folder,
    removing file by file, and a file is there in part before it is there as a whole.
    """

    def __init__(self, store: MemoryStore, wait: Callable[[str], str] = lambda _: "none") -> None:
        self._store = store
        self._wait = wait

    def _list(self, folder: str) -> tuple[list[str], list[str]]:
        """Return the paths of folders and files in a folder."""
        below = [path for path in self._store.files if path.startswith(f"{folder}/")]
        names = {path.removeprefix(f"{folder}/").partition("/")[::2] for path in below}
        folders = sorted({f"{folder}/{name}" for name, rest in names if rest})
        return folders, sorted(f"{folder}/{name}" for name, rest in names if not rest)

    def find(self, root: str, detail: bool) -> dict[str, dict[str, Any]]:
        """Return the files below a folder."""
        if self._wait("list") not in ("none", "late"):
            raise OSError("injected: not listed")
        found: dict[str, dict[str, Any]] = {}
        folders = [root]
        while folders:
            self._wait("list on")
            below, files = self._list(folders.pop())
            folders += below
            for path in files:
                size = len(self._store.files[path])
                found[path] = {"name": path, "size": size, "type": "file"}
        return found

    def ls(self, root: str, detail: bool) -> list[str]:
        """Return the paths of what a folder holds."""
        if self._wait("list names") not in ("none", "late"):
            raise OSError("injected: not listed")
        folders, files = self._list(root)
        return folders + files

    def open(self, path: str, mode: str) -> io.BytesIO:
        """Open a file to read."""
        if self._wait(f"read {path}") not in ("none", "late"):
            raise OSError("injected: not read")
        if path not in self._store.files:
            raise FileNotFoundError(path)
        return io.BytesIO(self._store.files[path])

    def get_file(self, path: str, file: str) -> None:
        """Copy a file from the store."""
        with self.open(path, "rb") as content:
            Path(file).write_bytes(content.read())

    def put_file(self, file: str, path: str) -> None:
        """Copy a file to the store."""
        self.pipe_file(path, Path(file).read_bytes())

    def pipe_file(self, path: str, content: bytes) -> None:
        """Write a file."""

        def put(length: int) -> None:
            self._store.files[path] = content[:length]
            self._store.version += 1

        self._act(f"write {path}", lambda: put(len(content) // 2), lambda: put(len(content)))

    def rm(self, path: str, recursive: bool) -> None:
        """Remove a file, or all below a folder, in any order."""

        def select() -> list[str]:
            return [name for name in self._store.files if f"{name}/".startswith(f"{path}/")]

        def remove(names: list[str]) -> None:
            for name in names:
                self._store.files.pop(name, None)
            self._store.version += 1

        self._act(f"remove {path}", lambda: remove(select()[::2]), lambda: remove(select()))

    def _act(self, text: str, begin: Callable[[], None], end: Callable[[], None]) -> None:
        fault = self._wait(text)
        if fault == "late":
            self._store.late.append(end)
        if fault in ("none", "no reply", "half"):
            begin()
        if fault in ("none", "no reply"):
            self._wait(f"{text} on")
            end()
        if fault != "none":
            raise OSError(f"injected: {fault}")


def open_memory(store: MemoryStore, wait: Callable[[str], str] = lambda _: "none") -> Storage:
    """Return the storage of a store for one client."""
    return Storage(URL, MemorySystem(store, wait), ROOT)


class Process:
    """Work with a store in a thread, which stops before every part of an operation."""

    def __init__(self, store: MemoryStore, work: Callable[[Storage], None]) -> None:
        self.error: BaseException | None = None
        self.is_done = False
        self.next = ""
        """The operation before which it stops."""
        self._fault = "none"
        self._is_killed = False
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._storage = open_memory(store, self._wait)
        self._thread = threading.Thread(target=self._run, args=(work,), daemon=True)
        self._thread.start()
        self._await_stop()

    def step(self, fault: str = "none") -> None:
        """Do the next part of an operation, with a fault if it is the first part."""
        if not self.is_done:
            self._fault = fault
            self._go.release()
            self._await_stop()

    def finish(self) -> None:
        """Do everything to the end."""
        while not self.is_done:
            self.step()

    def kill(self) -> None:
        """End the process before its next operation."""
        self._is_killed = True
        self.step()  # no part of an operation is done
        self._thread.join(SLOWEST_S)

    def _await_stop(self) -> None:
        if not self._stopped.acquire(timeout=SLOWEST_S):
            raise TimeoutError(f"neither stops nor ends after {self.next}")

    def _wait(self, text: str) -> str:
        self.next = text
        self._stopped.release()
        self._go.acquire()
        if self._is_killed:
            raise KilledError
        return "none" if text.endswith(" on") else self._fault

    def _run(self, work: Callable[[Storage], None]) -> None:
        try:
            work(self._storage)
        except BaseException as error:  # the caller examines it
            self.error = error
        self.is_done = True
        self._stopped.release()
