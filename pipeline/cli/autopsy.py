"""`python -m pipeline autopsy RUN_DIR`: compute and examine the bad step of a run again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import UsageError, printable_lines
from pipeline.inspect.autopsy.examine import examine
from pipeline.inspect.autopsy.reproducer import read_reproducer

USAGE = "autopsy takes RUN_DIR or its reproducer"
HELP = """usage: python -m pipeline autopsy RUN_DIR

Compute the bad step that ended a run once more and say where the loss or a gradient ceased to be
finite: layer, tensor, ranges of its operands, samples of the batch.

  RUN_DIR  a run that ended at a loss that is not finite, or the reproducer that it has kept

Exit status: 0 found again what the run had found, 1 found something else, 2 there is nothing to
look into.

example: python -m pipeline autopsy outputs/2026-11-21/14-46-29_lenet5_digits
"""


def main(args: Sequence[str]) -> int:
    """Print the finding; the exit status is 0 where it equals that of the run, else 1.

    Raises UsageError for other arguments, and all that `read_reproducer` raises.
    """
    if asks_for_help(args):
        return show_usage(HELP)
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
