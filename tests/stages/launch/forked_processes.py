"""Processes of a run, each under the variables of an engine, forked in a moment."""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
from pathlib import Path

from tests.forked import start_forked
from tests.stages.launch.engines import ENGINES


def find_open_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def train_in_processes(
    words: Sequence[str], cache: Path, folder: Path, size: int = 2, engine: str = "torchrun"
) -> tuple[list[int | None], list[str]]:
    """Run the command in `size` processes; return their exit statuses and their lines."""
    port = find_open_port()
    files = [folder / f"{engine}_{size}_{rank}.txt" for rank in range(size)]
    processes = []
    for rank, lines in enumerate(files):
        environment = {
            **os.environ,
            "XDG_CACHE_HOME": str(cache.parent),
            **ENGINES[engine](rank, size, port),
        }
        processes.append(start_forked(words, folder, environment, [lines] * 2))
    for process in processes:
        process.join(240)
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()  # one that still waits for another, which has failed
    return statuses, [file.read_text() for file in files]
