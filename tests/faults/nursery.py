"""A process that has imported all a run needs, and forks a run for each request on its stdin.

JAX takes no harm from it as long as the process that is forked has opened no device: imports start
no thread. The run is the forked process itself, so that it ends as `python -m pipeline` does, with
what Python and its libraries do at exit. Most runs are spared what Hydra does, a third of the time:
it has composed the same arguments here before.
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

PARTING_S = 1.0
"""How long a run that hangs has to say where."""


def main() -> int:
    """Answer each line, a JSON object, with one: the exit status, and whether it took too long."""
    # Loaded when it is first needed, by nearly every run.
    import tensorboardX.record_writer  # noqa: F401

    import pipeline.stages.run
    import pipeline.study.sweep.command  # noqa: F401
    from pipeline.__main__ import main as command
    from pipeline.cli import train

    compose, known = train._compose, {}
    assert threading.active_count() == 1, "a process with threads must not be forked"
    gc.collect()
    gc.freeze()
    library = CDLL(None)
    for line in sys.stdin:
        asked = json.loads(line)
        if not asked["whole"]:
            _compose_once(asked["arguments"], compose, known)
            train._compose = lambda flags, typed, overrides: known[tuple(typed)]
        pid = os.fork()
        if pid == 0:
            _become(asked)
            library.inject_arm()
            return command(asked["arguments"])
        train._compose = compose
        print(json.dumps(_wait(pid, asked["limit_s"])), flush=True)
    return 0


def _compose_once(
    arguments: Sequence[str], compose: Callable[..., Any], known: dict[tuple[str, ...], Any]
) -> None:
    from pipeline.config.compose import resolve_recipe

    if tuple(arguments) in known:
        return
    before = os.getcwd()
    # Hydra makes the run directory.
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        known[tuple(arguments)] = compose([], arguments, resolve_recipe(arguments))
        os.chdir(before)


def _become(asked: Mapping[str, Any]) -> None:
    """Take the place and the environment of a run."""
    os.chdir(asked["folder"])
    console = os.open(asked["console"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for there, here in ((nothing, 0), (console, 1), (console, 2)):
        os.dup2(there, here)
    os.environ.update(asked["environment"])
    faulthandler.register(signal.SIGUSR2, all_threads=True)


def _wait(pid: int, limit_s: float) -> dict[str, Any]:
    """Return the exit status of a run, negative for a signal; end one that takes too long."""
    begun, handle = time.monotonic(), os.pidfd_open(pid)
    hangs = not _ends(handle, limit_s)
    if hangs:
        os.kill(pid, signal.SIGUSR2)
        if not _ends(handle, PARTING_S):
            os.kill(pid, signal.SIGKILL)
    os.close(handle)
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return {"status": status, "hangs": hangs, "seconds": time.monotonic() - begun}


def _ends(handle: int, limit_s: float) -> bool:
    return bool(select.select([handle], [], [], limit_s)[0])


if __name__ == "__main__":
    sys.exit(main())
