"""`python -m pipeline diff RUN_A RUN_B`: what sets two runs apart, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import UsageError
from pipeline.observe.comparison import compare_steps
from pipeline.observe.log_lines import METRICS
from pipeline.observe.run_record import compare_outcomes, read_record
from pipeline.observe.side_by_side import SideBySide

USAGE = "diff takes RUN_A RUN_B"


def diff(args: Sequence[str]) -> int:
    """Print the differences of two runs; the exit status is 0, also where there are none.

    Raises UsageError for other arguments, DataError where a run can't be read.
    """
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise UsageError(args, USAGE)
    one, other = (read_record(Path(arg)) for arg in args)
    logs = one.run_dir / METRICS, other.run_dir / METRICS
    steps = compare_steps(*logs) if all(log.exists() for log in logs) else None
    page = SideBySide(one, other)
    page.show_origins()
    page.show_differences("outcome", compare_outcomes(one, other))
    page.show_steps(steps)
    return 0
