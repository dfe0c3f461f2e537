"""The entry point of the command line: runs a command and reports an error as one message.

`pipeline.core.errors.get_exit_status` lists the exit statuses. Most modules are imported inside
functions, since the process may restart itself to configure its memory allocator
(`pipeline.core.host.process_start`), and then imports everything again.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from pipeline.cli.commands import COMPLETION_VARIABLE
from pipeline.core.host.process_start import (
    collect_less_while_starting,
    open_closed_streams,
    reexec_with_malloc_tunables,
)

_STARTED_AT = time.perf_counter()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command that the arguments name, and return the exit status.

    With None, these are the arguments of the process, and the process must end after the command.
    """
    open_closed_streams()
    owns_process = arguments is None
    if owns_process and os.environ.get(COMPLETION_VARIABLE):
        return _complete(os.environ[COMPLETION_VARIABLE])
    if owns_process and "device=gpu" not in sys.argv:
        # The tunables make allocations faster in programs on the CPU.
        reexec_with_malloc_tunables()
    started_at = _STARTED_AT if owns_process else time.perf_counter()
    statuses: list[int] = []
    if owns_process and sys.gettrace() is None and sys.getprofile() is None:
        # Registered first, so it is called after all other functions.
        atexit.register(_exit_at_once, statuses)
    from pipeline.core.host.signals import end_on_signal, interrupt_command
    from pipeline.core.report_errors import report_errors

    if owns_process:
        interrupt_command()
    args = list(sys.argv[1:] if arguments is None else arguments)
    collect_less_while_starting()
    debug = "debug=true" in map(str.lower, args)
    try:
        command = partial(_load_plugins_and_run, args, started_at, owns_process)
        status = report_errors(command, debug=debug)
    except KeyboardInterrupt:  # a second signal, while the first was being reported
        status = 1
    if owns_process:
        end_on_signal(status)
    statuses.append(status)
    return status


def _complete(instruction: str) -> int:
    """Print the completions of the command line for a shell; return the exit status."""
    from pipeline.cli.commands.root import ROOT
    from pipeline.cli.completion import complete

    with suppress(OSError):  # the working folder has been removed
        return complete(ROOT, instruction)
    return 1


def _exit_at_once(statuses: Sequence[int]) -> None:
    """End the process without freeing its objects, which would take half a second with jax.

    Threads have ended and all other exit functions were called before. `statuses` has the exit
    status. If it is empty, since the command raised an error, Python ends the process as usual.
    """
    if statuses:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(statuses[0])


def _load_plugins_and_run(arguments: Sequence[str], started_at: float, owns_process: bool) -> int:
    """Load the plug-ins that the arguments name, run the command, or train if they name none, and
    return the exit status."""
    from pipeline.core.deprecations import rename_arguments
    from pipeline.core.host.process_start import require_known_flags, require_usable_environment
    from pipeline.core.plugins.loading import export_plugins, take_flags

    require_usable_environment()
    if owns_process:
        require_known_flags()
    plugins, words = take_flags(arguments)
    args = rename_arguments(words)
    if plugins:
        from pipeline.core.registry import load_others

        export_plugins(plugins)
        load_others()
    if _names_command(args):
        from pipeline.cli.commands.root import run_command

        return run_command(args)
    from pipeline.cli.train import main as train

    return train(args, started_at=started_at, alone=owns_process)


def _names_command(args: Sequence[str]) -> bool:
    """Return whether arguments name a command or ask for help, and don't just set a recipe's keys
    and Hydra's flags."""
    if {"--help", "-h", "--version"} & set(args):
        return True
    return bool(args) and args[0][:1] not in "-+~" and "=" not in args[0]


def _leave_working_folder() -> None:
    """Remove the working folder from `sys.path`, so that no file of it is imported as a module.

    `python -m` puts that folder first on the path. PYTHONSAFEPATH keeps it off the path of child
    processes. If the folder is a checkout of this package, it stays on the path.
    """
    from pipeline.core.files.paths import PACKAGE

    try:
        folder = os.path.realpath(os.getcwd())
    except OSError:  # the folder has been removed, which the command reports
        return
    first_path = os.path.realpath(sys.path[0])
    if first_path == folder and first_path != str(PACKAGE.parent):
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    _leave_working_folder()
    sys.exit(main())
