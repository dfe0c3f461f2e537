"""The command line: do what it says; tell in one message what went wrong.

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial

from pipeline.cli._usage import asks_for_help
from pipeline.errors import report_errors
from pipeline.files.package_paths import PACKAGE
from pipeline.host.allocator import restart_with_kept_memory
from pipeline.host.signals import interrupt_command

COLLECT_SELDOM = (100_000, 20, 100)
COMMANDS = (
    *("autopsy", "convert", "diff", "doctor", "explain", "export", "infer"),
    *("reproduce", "schema"),
)
"""Each a module of this package, or of `config`, whose function of that name takes what follows."""
MODULES = {"autopsy": "pipeline.cli.autopsy", "schema": "pipeline.config.schema"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Do what the arguments say and return the exit status."""
    if arguments is None:
        restart_with_kept_memory()
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
        return _show_guide
    return partial(_launch, args, begun)


def _show_guide() -> int:
    from pipeline.cli.help import guide

    print(guide())
    return 0


def _call(command: str, args: list[str]) -> int:
    """Commands are imported when they are called: few need what others do."""
    module = importlib.import_module(MODULES.get(command, f"pipeline.{command}"))
    return getattr(module, command)(args)


def _launch(args: list[str], begun: float) -> int:
    from pipeline.cli.train import launch

    return launch(args, begun)


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
