"""Commands in forked processes that start in a moment, since the package is already imported.

Imports and a first composition take three seconds of a command, as long as a small run. A fork is
safe for JAX as long as the forked process has opened no device. The start of a command is for
tests that start it as a user does.
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
PRELOADED = [
    "tests.forked",
    "tests.component_modules",
    "pipeline.cli.train",
    "pipeline.stages.run",
    "grain",
    "pipeline.backends.xla",
]
CONTEXT.set_forkserver_preload(PRELOADED)


def start_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], streams: Sequence[Path]
) -> ForkServerProcess:
    """Start `python -m pipeline` in a folder; stdout and stderr are appended to two files."""
    process = CONTEXT.Process(
        target=_run_command, args=(list(arguments), folder, dict(environment), list(streams))
    )
    process.start()
    return process


def run_forked(
    arguments: Sequence[str], folder: Path, environment: Mapping[str, str], timeout: float = 300
) -> subprocess.CompletedProcess[str]:
    """Run `python -m pipeline` with these arguments in a folder; return its status and output.

    The return code is negative for a signal. Raises TimeoutError after `timeout` seconds.
    """
    streams = [folder / f".{name}" for name in ("stdout", "stderr")]
    process = start_forked(arguments, folder, environment, streams)
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise TimeoutError(f"{arguments}: no end within {timeout:g} s")
    texts = [file.read_text() if file.exists() else "" for file in streams]
    for file in streams:
        file.unlink(missing_ok=True)
    return subprocess.CompletedProcess(list(arguments), process.exitcode, texts[0], texts[1])


def _run_command(
    arguments: list[str], folder: Path, environment: dict[str, str], streams: list[Path]
) -> None:
    import jax

    from pipeline.__main__ import main
    from pipeline.core.host.signals import end_on_signal, interrupt_command

    os.fsync = lambda descriptor: None  # 5 ms each, and no test cuts the power
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    # JAX reads it when it is imported, perhaps in another environment.
    unoptimized = environment.get("JAX_DISABLE_MOST_OPTIMIZATIONS") == "1"
    jax.config.update("jax_disable_most_optimizations", unoptimized)
    for stream, file in zip((sys.stdout, sys.stderr), streams, strict=True):
        with file.open("a") as output:
            os.dup2(output.fileno(), stream.fileno())
    sys.argv = ["pipeline", *arguments]
    sys.orig_argv = [sys.executable, "-m", "pipeline", *arguments]
    interrupt_command()
    status = main(arguments)
    end_on_signal(status)
    # Multiprocessing ends a process without its exit functions.
    atexit._run_exitfuncs()
    sys.exit(status)
