"""The command line: run a command, and report an error as one message.

Exit status: 0 done, 1 the run failed or was stopped, 2 the recipe or its data is wrong. Little is
imported at the top, since a process restarts itself with settings of its allocator before it begins
(`pipeline.core.host.process_start`), and imports all of it again.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from pipeline.cli.commands import COMPLETION_VARIABLE
from pipeline.core.host.process_start import (
    collect_less_while_starting,
    open_closed_streams,
    reexec_with_malloc_tunables,
)

_STARTED_AT = time.perf_counter()
ON_GPU = "device=gpu"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command of the arguments and return the exit status.

    Without arguments, those of the process are used, and the process ends with the command.
    """
    open_closed_streams()
    alone = arguments is None
    if alone and os.environ.get(COMPLETION_VARIABLE):
        return _complete(os.environ[COMPLETION_VARIABLE])
    if alone and ON_GPU not in sys.argv:
        # What it speeds up is the memory of programs of the processor.
        reexec_with_malloc_tunables()
    started_at = _STARTED_AT if alone else time.perf_counter()
    ended: list[int] = []
    if alone and sys.gettrace() is None and sys.getprofile() is None:
        # Before anything else registers a function for the end: it is called after all of them.
        atexit.register(_leave, ended)
    from pipeline.core.errors import report_errors
    from pipeline.core.host.signals import end_on_signal, interrupt_command

    interrupt_command()
    typed = list(sys.argv[1:] if arguments is None else arguments)
    collect_less_while_starting()
    debug = "debug=true" in map(str.lower, typed)
    try:
        status = report_errors(lambda: _command(typed, started_at, alone)(), debug=debug)
    except KeyboardInterrupt:  # a second signal, while the first was being reported
        status = 1
    if alone:
        end_on_signal(status)
    ended.append(status)
    return status


def _complete(instruction: str) -> int:
    from pipeline.cli.commands.root import ROOT
    from pipeline.cli.completion import complete

    with suppress(OSError):  # the working folder has been removed
        return complete(ROOT, instruction)
    return 1


def _leave(ended: Sequence[int]) -> None:
    """End the process, at its very end, without taking its objects apart one by one.

    Threads have been waited for and all other functions for the end were called. Python would go on
    to free millions of objects of jax, for half a second. Not if the command raised something.
    """
    if ended:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(ended[0])


def _command(typed: Sequence[str], started_at: float, alone: bool) -> Callable[[], int]:
    from pipeline.cli.commands.root import run_command
    from pipeline.core.host.environment import require_known_flags, require_usable_environment
    from pipeline.core.plugins.loading import name_for_all, take_flags

    require_usable_environment()
    if alone:
        require_known_flags()
    plugins, args = take_flags(typed)
    if plugins:
        from pipeline.core.registry import load_all

        name_for_all(plugins)
        load_all()
    return partial(run_command, args, started_at, alone=alone)


def _leave_working_folder() -> None:
    """Import modules from where they are installed, not from the working folder, which holds data.

    `python -m` puts that folder first on the path. Child processes get PYTHONSAFEPATH. A checkout
    that is the working folder stays on the path.
    """
    from pipeline.core.files.package_paths import PACKAGE

    try:
        folder = os.path.realpath(os.getcwd())
    except OSError:  # it has been removed, which the command reports
        return
    first = os.path.realpath(sys.path[0])
    if first == folder and first != str(PACKAGE.parent):
        del sys.path[0]
        os.environ["PYTHONSAFEPATH"] = "1"


if __name__ == "__main__":
    _leave_working_folder()
    sys.exit(main())
