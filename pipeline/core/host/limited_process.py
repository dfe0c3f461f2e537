"""Child processes of limited memory and time, in which libraries read files of strangers.

A library may allocate without end, take hours, print anything or abort its process. A process can't
prevent that if it calls the library itself.
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
from pipeline.core.host.memory import read_available_bytes

_SETTINGS: Mapping[str, str] = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # other pools reserve a GiB of address space
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "PYTHONSAFEPATH": "1",
    "RAYON_NUM_THREADS": "1",
    "RUST_BACKTRACE": "0",
    "TOKENIZERS_PARALLELISM": "false",
}


class LibraryError(ValueError):
    """An error of a library in a child process, with the first line of its message."""


class ChildLimitError(ValueError):
    """A child process exceeded a limit, or was killed."""


@dataclass(frozen=True)
class ChildLimits:
    """The limits of a child process."""

    memory_bytes: int
    """Size of its address space."""
    cpu_s: int
    """Processor time since its start."""


class LimitedProcess:
    """A child process that runs a module, which calls `limited_child.serve`.

    The process ends when this object is deleted.
    """

    def __init__(self, module: str) -> None:
        # The child must find libraries in all folders of this process.
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **_SETTINGS, "PYTHONPATH": path},
            # Ctrl-C must not reach the child, since this process finishes its request.
            start_new_session=True,
        )
        weakref.finalize(self, _kill, self._process)
        self._exceeded: str | None = None
        """The limit at which the process has ended."""
        self._lock = Lock()

    def ask(self, kind: bytes, content: bytes, limits: ChildLimits) -> bytes:
        """Return the answer to a request of a kind, which is a letter, with its content.

        Raises ImportError if the library isn't installed, LibraryError for an error of the library,
        and ChildLimitError.
        """
        memory_bytes = min(read_available_bytes(), limits.memory_bytes)
        head = REQUEST.pack(kind, memory_bytes, limits.cpu_s, len(content))
        with self._lock:
            if self._exceeded is not None:
                why = f"has ended, since an earlier request took more than {self._exceeded}"
                raise ChildLimitError(f"{why}, and can't be used")
            try:
                status, answer = _exchange(self._process, head + content)
            except (OSError, struct.error):
                if self._process.wait() == -signal.SIGXCPU:
                    self._exceeded = f"{limits.cpu_s:,} s of processor time"
                else:
                    # Without memory, a library aborts, or Python exits.
                    self._exceeded = f"{memory_bytes / 1e9:,.1f} GB of memory"
                raise ChildLimitError(f"takes more than {self._exceeded}") from None
        if status == NOT_INSTALLED:
            raise ImportError(answer.decode())
        if status != DONE:
            raise LibraryError(printable(answer.decode().partition("\n")[0]))
        return answer


def _exchange(process: subprocess.Popen[bytes], request: bytes) -> tuple[bytes, bytes]:
    """Return the status and the content of an answer. Raises OSError or struct.error if none."""
    requests = cast(Any, process.stdin)
    answers = cast(Any, process.stdout)
    requests.write(request)
    requests.flush()
    status, size_bytes = ANSWER.unpack(answers.read(ANSWER.size))
    answer = answers.read(size_bytes)
    if len(answer) < size_bytes:
        raise struct.error
    return status, answer


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        # Closing flushes a request that the process hasn't read to its end.
        with suppress(BrokenPipeError):
            cast(Any, pipe).close()
