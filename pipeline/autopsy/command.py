"""`python -m pipeline autopsy RUN_DIR`: the bad step of a run, computed and examined once more."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.autopsy.examine import examine
from pipeline.autopsy.reproducer import read_reproducer
from pipeline.errors import UsageError, printable_lines

USAGE = "autopsy takes RUN_DIR or its reproducer"


def autopsy(args: Sequence[str]) -> int:
    """Print what is found; the exit status is 0 where it is what the run found, else 1.

    Raises UsageError for other arguments, and what `read_reproducer` raises.
    """
    if len(args) != 1 or args[0].startswith("-"):
        raise UsageError(args, USAGE)
    kept = read_reproducer(Path(args[0]))
    again = examine(kept.parts, kept.state, kept.batch, kept.device)
    print(printable_lines(str(again)))
    if str(again) == kept.found:
        print("this is what the run has found")
        return 0
    print(printable_lines(f"the run has found:\n{kept.found}"))
    return 1
