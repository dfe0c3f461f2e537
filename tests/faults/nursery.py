"""A process that has imported everything, and forks a run for each request on its stdin.

This is safe for JAX as long as the forking process has opened no device; imports start no thread.
The run is the forked process itself, so it ends as `python -m pipeline` does, with the exit
functions of Python and its libraries. Most runs skip Hydra, a third of their time: this process
composes the same arguments only once.
"""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from ctypes import CDLL
from typing import Any

TRACEBACK_S = 1.0
"""Time of a hanging run to print its traceback."""


def main() -> int:
    """Answer each request, a line of JSON, with the exit status, the time and whether it hung."""
    # Nearly every run imports it later.
    import tensorboardX.record_writer  # noqa: F401

    import pipeline.stages.run
    import pipeline.study.sweep.directory  # noqa: F401
    from pipeline.__main__ import main as command
    from pipeline.cli import train
    from pipeline.core.host.signals import interrupt_command

    compose = train._compose
    composed: dict[tuple[str, ...], Any] = {}
    assert threading.active_count() == 1, "a process with threads must not be forked"
    gc.collect()
    gc.freeze()
    library = CDLL(None)
    for line in sys.stdin:
        request = json.loads(line)
        if not request["whole"]:
            _compose_once(request["arguments"], compose, composed)
            train._compose = lambda flags, typed, overrides: composed[tuple(typed)]
        pid = os.fork()
        if pid == 0:
            _enter_run(request)
            interrupt_command()
            library.inject_arm()
            return command(request["arguments"])
        train._compose = compose
        print(json.dumps(_wait(pid, request["limit_s"])), flush=True)
    return 0


def _compose_once(
    arguments: Sequence[str], compose: Callable[..., Any], composed: dict[tuple[str, ...], Any]
) -> None:
    from pipeline.config.compose import resolve_recipe

    if tuple(arguments) in composed:
        return
    before = os.getcwd()
    # Hydra makes the run directory.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        composed[tuple(arguments)] = compose([], arguments, resolve_recipe(arguments))
        os.chdir(before)


def _enter_run(request: Mapping[str, Any]) -> None:
    """Enter the folder and the environment of a run, and redirect its streams."""
    os.chdir(request["folder"])
    console = os.open(request["console"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(console, 1)
    os.dup2(console, 2)
    os.environ.update(request["environment"])
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def _wait(pid: int, limit_s: float) -> dict[str, Any]:
    """Return the exit status of a run, negative for a signal; kill it after `limit_s`."""
    start_s = time.monotonic()
    handle = os.pidfd_open(pid)
    hangs = not _ends(handle, limit_s)
    if hangs:
        os.kill(pid, signal.SIGUSR2)
        if not _ends(handle, TRACEBACK_S):
            os.kill(pid, signal.SIGKILL)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"status": status, "hangs": hangs, "seconds": time.monotonic() - start_s}


def _ends(handle: int, limit_s: float) -> bool:
    return bool(select.select([handle], [], [], limit_s)[0])


if __name__ == "__main__":
    sys.exit(main())
