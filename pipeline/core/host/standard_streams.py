"""The standard streams of a process that was started without some of them."""

from __future__ import annotations

import os
import sys


def open_closed_streams() -> None:
    """Open those of stdin, stdout and stderr that are closed, on nothing.

    Otherwise Python has no `sys.stdout`, and the next file that is opened takes its number: what
    libraries print would land in a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest number that is free is this one.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w", closefd=False)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)
