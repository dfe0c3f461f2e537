"""The command line: run a command, and report an error as one message.

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
from pipeline.cli.arguments.usage import asks_for_help
from pipeline.errors import report_errors
from pipeline.files.package_paths import PACKAGE
from pipeline.host.allocator import reexec_with_malloc_tunables
from pipeline.host.signals import interrupt_command
from pipeline.plugins.loading import name_for_all, take_flags
from pipeline.registry import load_all

ON_GPU = "device=gpu"
COLLECT_SELDOM = (100_000, 20, 100)
COMMANDS = frozenset(
    module.name
    for module in pkgutil.iter_modules(cli.__path__)
    if not (module.ispkg or "_" in module.name or module.name in ("train", "help"))
)
"""Modules of `pipeline.cli`, each with a `main(args)`. A command line without one trains."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the arguments and return the exit status."""
    if arguments is None and ON_GPU not in sys.argv:
        # What it speeds up is the memory of programs of the processor.
        reexec_with_malloc_tunables()
    started_at = time.perf_counter()
    interrupt_command()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    # Imports and tracing create millions of long-lived objects; collecting garbage among them
    # repeatedly took some 0.25 of 3 s until the first step.
    gc.set_threshold(*COLLECT_SELDOM)
    debug = "debug=true" in map(str.lower, typed)
    return report_errors(lambda: _command(typed, started_at)(), debug=debug)


def _command(typed: Sequence[str], started_at: float) -> Callable[[], int]:
    plugins, args = take_flags(typed)
    if plugins:
        name_for_all(plugins)
        load_all()
    if args and args[0] in COMMANDS:
        return partial(_call, args[0], args[1:])
    if asks_for_help(args):
        return partial(_call, "help", args)
    return partial(_call, "train", args, started_at)


def _call(command: str, args: list[str], *more: float) -> int:
    """Import a command's module only when it is called, which keeps commands fast, and run it."""
    status: int = importlib.import_module(f"pipeline.cli.{command}").main(args, *more)
    return status


def _leave_working_folder() -> None:
    """Import modules from where they are installed, not from the working folder, which holds data.

    `python -m` puts that folder first on the path. Child processes get PYTHONSAFEPATH. A checkout
    that is the working folder stays on the path.
    """
    first = os.path.realpath(sys.path[0])
    if first == os.path.realpath(os.getcwd()) and first != str(PACKAGE.parent):
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    _leave_working_folder()
    sys.exit(main())
