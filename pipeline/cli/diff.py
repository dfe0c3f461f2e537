"""`python -m pipeline diff RUN_A RUN_B`: the differences of two runs and of their results."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import UsageError
from pipeline.engine.monitors.log_lines import METRICS
from pipeline.stages.record.compare_steps import compare_steps
from pipeline.stages.record.run_record import compare_outcomes, read_record
from pipeline.stages.record.side_by_side import SideBySide

USAGE = "diff takes RUN_A RUN_B"
HELP = """usage: python -m pipeline diff RUN_A RUN_B

Show what sets two runs apart: recipe, code, versions, data and machine; then their metrics, and the
first step at which their losses differ.

  RUN_A, RUN_B   run directories

Exit status: 0, also where nothing differs; 2 where a run can't be read.

example: python -m pipeline diff outputs/2026-11-21/14-46-29_lenet5_digits outputs/again
"""


def main(args: Sequence[str]) -> int:
    """Print the differences of two runs; the exit status is 0, also where there are none.

    Raises UsageError for other arguments, DataError where a run can't be read.
    """
    if asks_for_help(args):
        return show_usage(HELP)
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
