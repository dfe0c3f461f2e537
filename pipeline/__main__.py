"""The command line: do what it says; tell in one message what went wrong.

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong.
"""

from __future__ import annotations

import gc
import importlib
import os
import pkgutil
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from pipeline import cli
from pipeline.cli._usage import asks_for_help
from pipeline.errors import report_errors
from pipeline.files.package_paths import PACKAGE
from pipeline.host.allocator import reexec_with_malloc_tunables
from pipeline.host.signals import interrupt_command

COLLECT_SELDOM = (100_000, 20, 100)
COMMANDS = frozenset(
    module.name
    for module in pkgutil.iter_modules(cli.__path__)
    if "_" not in module.name and module.name not in ("train", "help")
)
"""Modules of `pipeline.cli` with a `main(args)` each. A command line without one trains."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit status."""
    if arguments is None:
        reexec_with_malloc_tunables()
    begun = time.perf_counter()
    interrupt_command()
    args = list(sys.argv[1:] if arguments is None else arguments)
    # Imports and tracing make millions of objects that stay; looking through them again and again
    # for garbage took some 0.25 of 3 s until the first step.
    gc.set_threshold(*COLLECT_SELDOM)
    debug = "debug=true" in map(str.lower, args)
    return report_errors(lambda: _command(args, begun)(), debug=debug)


def _command(args: list[str], begun: float) -> Callable[[], int]:
    if args and args[0] in COMMANDS:
        return partial(_call, args[0], args[1:])
    if asks_for_help(args):
        return partial(_call, "help", args)
    return partial(_call, "train", args, begun)


def _call(command: str, args: list[str], *more: float) -> int:
    """Import a command when it is called, since few need what others do, and run it."""
    status: int = importlib.import_module(f"pipeline.cli.{command}").main(args, *more)
    return status


def _leave_working_folder() -> None:
    """Look for modules where they are installed, not in the working folder: data lies there.

    `python -m` puts that folder first; programs that are started from here are told not to. A
    checkout that is run where it lies stays on the path.
    """
    first = os.path.realpath(sys.path[0])
    if first == os.path.realpath(os.getcwd()) and first != str(PACKAGE.parent):
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    _leave_working_folder()
    sys.exit(main())
