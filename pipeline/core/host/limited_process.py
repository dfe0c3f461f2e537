"""Child processes of limited memory and time, for libraries that read files of strangers.

A library can allocate without end, take hours, print what it likes and abort its process. The
process that calls it can catch none of that.
"""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from threading import Lock
from typing import Any, cast

from pipeline.core.errors import printable
from pipeline.core.host.limited_child import ANSWER, DONE, NOT_INSTALLED, REQUEST
from pipeline.core.host.memory import available_bytes

_SETTINGS: Mapping[str, str] = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a GiB of addresses
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class LibraryError(ValueError):
    """Error of a library in a child process, by the first line of its message."""


class ChildLimitError(ValueError):
    """A child process that exceeded a limit, or was killed."""


@dataclass(frozen=True)
class ChildLimits:
    """The limits of a child process: its addresses, and its processor time since its start."""

    memory_bytes: int
    cpu_s: int


class LimitedProcess:
    """A child process that runs a module, which calls `limited_child.serve`.

    It ends when this object is dropped.
    """

    def __init__(self, module: str) -> None:
        # A library may be installed in a folder that only this process knows.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
            # Ctrl-C is for this process, which finishes what it does.
            start_new_session=True,
        )
        weakref.finalize(self, _end, self._process)
        self._lock = Lock()

    def ask(self, kind: bytes, content: bytes, limits: ChildLimits) -> bytes:
        """The answer to a request.

        Raises ImportError for a library that isn't installed, LibraryError for what it raises, and
        ChildLimitError.
        """
        memory_bytes = min(available_bytes(), limits.memory_bytes)
        head = REQUEST.pack(kind, memory_bytes, limits.cpu_s, len(content))
        with self._lock:
            try:
                status, answer = _exchange(self._process, head + content)
            except (OSError, struct.error):
                if self._process.wait() == -signal.SIGXCPU:
                    limit = f"{limits.cpu_s:,} s of processor time"
                else:
                    # Libraries abort, or Python exits, when they get no memory.
                    limit = f"{memory_bytes / 1e9:,.1f} GB of memory"
                raise ChildLimitError(f"takes more than {limit}") from None
        if status == NOT_INSTALLED:
            raise ImportError(answer.decode())
        if status != DONE:
            raise LibraryError(printable(answer.decode().partition("\n")[0]))
        return answer


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
    """The status and the content of an answer. Raises OSError or struct.error without one."""
    requests = cast(Any, process.stdin)
    answers = cast(Any, process.stdout)
    requests.write(request)
    requests.flush()
    status, size_bytes = ANSWER.unpack(answers.read(ANSWER.size))
    answer = answers.read(size_bytes)
    if len(answer) < size_bytes:
        raise struct.error
    return status, answer


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # Closing writes what is left of a request that ended the process.
        with suppress(BrokenPipeError):
            cast(Any, pipe).close()
