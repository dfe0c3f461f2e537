"""A watch that ends this process with a message before Linux kills it without one."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.core.errors import RunError
from pipeline.core.host.memory import read_available_bytes, return_free_pages

PERIOD_S = 0.05
"""Time between two measurements of the available memory."""


@contextmanager
def end_without_memory(reserved_bytes: int, problem: str) -> Iterator[None]:
    """End this process if less than `reserved_bytes` are available during the body.

    The process prints `problem` and has the exit status of a failed run. It is for code that no
    exception can interrupt, such as XLA's compiler.
    """
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(PERIOD_S):
            if read_available_bytes() >= reserved_bytes:
                continue
            return_free_pages()
            if read_available_bytes() < reserved_bytes:
                _end(problem)

    thread = threading.Thread(target=watch, name="memory", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _end(problem: str) -> None:
    print(f"error: {problem}", file=sys.stderr, flush=True)
    os._exit(RunError.exit_status)
