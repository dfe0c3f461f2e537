"""A process of its own at the other end of a pipe, and which of them a command line asks for."""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

NOTHING: Mapping[str, str] = {}


@contextmanager
def child_process(
    serve: Callable[..., None], *args: Any, daemon: bool, environment: Mapping[str, str] = NOTHING
) -> Iterator[tuple[BaseProcess, Connection]]:
    """`serve(pipe, *args)` in a fresh process that ends with the context, and our end of the pipe.

    `serve` returns when its pipe is closed; a child that doesn't is killed. A daemon can't have
    processes of its own. What this process has in its environment is not replaced.
    """
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=serve, args=(its, *args), daemon=daemon)
    added = environment.keys() - os.environ.keys()
    os.environ.update({name: environment[name] for name in added})
    process.start()
    for name in added:
        del os.environ[name]
    its.close()
    try:
        yield process, ours
    finally:
        ours.close()
        process.join(timeout=10)
        if process.is_alive():
            process.kill()


def names_among(peers: Collection[str]) -> Callable[[str], list[str]]:
    """Return an argparse type: names of `peers`, with commas between them."""

    def parse(text: str) -> list[str]:
        names = [name for name in text.split(",") if name]
        unknown = [name for name in names if name not in peers]
        if unknown:
            raise argparse.ArgumentTypeError(
                f"no peer {', '.join(unknown)}; there are {', '.join(peers)}"
            )
        return names

    return parse
