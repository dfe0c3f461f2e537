"""Terminals, and pseudo-terminals that only look like one."""

from __future__ import annotations

import os
from typing import TextIO

KERNEL = "JPY_PARENT_PID"
"""Variable that Jupyter sets for kernels, and that their child processes inherit."""
NO_CURSOR = ("dumb", "unknown")
"""Values of TERM of terminals that can't move the cursor."""


def can_redraw(file: TextIO) -> bool:
    """Return whether a file is a terminal on which a line can be replaced.

    Not so is the pseudo-terminal that a notebook opens for `!command`: the notebook saves whatever
    is written to it, each frame of a bar too.
    """
    if KERNEL in os.environ or os.environ.get("TERM") in NO_CURSOR:
        return False
    return file.isatty()
