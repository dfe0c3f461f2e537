"""Commands in processes of their own that start in a moment: forked from one that has imported all
there is.

Imports and a first composition take three seconds of a command, as long as a small run. JAX takes
no harm from a fork as long as the process that is forked has opened no device. What a command does
when it starts is for tests that start it as a user does.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = [
    "tests.forked",
    "tests.component_modules",
    "pipeline.cli.train",
    "pipeline.stages.run",
    "grain",
]
IMPORTED += ["pipeline.backends.xla"]
CONTEXT.set_forkserver_preload(IMPORTED)


def start_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], said: Sequence[Path]
) -> ForkServerProcess:
    """Start `python -m pipeline` in a folder; both streams are appended to the files `said`."""
    process = CONTEXT.Process(
        target=_command, args=(list(arguments), folder, dict(environment), list(said))
    )
    process.start()
    return process


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python -m pipeline` with these arguments in a folder; return how it ended.

    The return code is negative for a signal. Raises TimeoutError after `timeout` seconds.
    """
    said = [folder / f".{name}" for name in ("stdout", "stderr")]
    process = start_forked(arguments, folder, environment, said)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{arguments}: no end within {timeout:g} s")
    texts = [file.read_text() if file.exists() else "" for file in said]
    for file in said:
        file.unlink(missing_ok=True)
    return subprocess.CompletedProcess(list(arguments), process.exitcode, *texts)


def _command(
    arguments: list[str], folder: Path, environment: dict[str, str], said: list[Path]
) -> None:
    import jax

    from pipeline.__main__ import main

    os.fsync = lambda descriptor: None  # 5 ms each; only a power cut could tell
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # Read when JAX was imported, which may have been in another environment.
    unoptimized = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", unoptimized)
    for stream, file in zip((sys.stdout, sys.stderr), said, strict=True):
        with file.open("a") as written:
            os.dup2(written.fileno(), stream.fileno())
    sys.argv = ["pipeline", *arguments]
    sys.orig_argv = [sys.executable, "-m", "pipeline", *arguments]
    status = main(arguments)
    # Multiprocessing ends a process without them.
    atexit._run_exitfuncs()
    sys.exit(status)
