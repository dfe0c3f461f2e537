"""`python -m pipeline report RUN_DIR`: what a trained network gets right and wrong, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.core.errors import UsageError, printable
from pipeline.inspect.report.write_report import write_report

OUT = "--out="
USAGE = "report takes RUN_DIR and --out=FOLDER"
HELP = """usage: python -m pipeline report RUN_DIR [--out=FOLDER]

Evaluate a run's checkpoint on its evaluation split, and write what it gets right and wrong: a page
without server or network (index.html), and files: every prediction, the table of classes, the
confusion matrix, the worst mistakes, the curves of training. The page ends with the lineage of the
run, and with its profile and dumps where it has any.

  RUN_DIR        a run that has saved a checkpoint, or one of its checkpoints
  --out=FOLDER   where to write; RUN_DIR/report without it. Files of an earlier report are replaced

example: python -m pipeline report outputs/2026-11-21/14-46-29_lenet5_digits
"""


def main(args: Sequence[str]) -> int:
    """Write the report of a run, and print its main figures; the exit status is 0.

    Raises UsageError for other arguments, RecipeError and DataError where the run or its data can't
    be read, RunError where the folder can't be written.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    outs = [arg.removeprefix(OUT) for arg in args if arg.startswith(OUT)]
    words = [arg for arg in args if not arg.startswith("-")]
    if len(words) != 1 or len(outs) > 1 or len(words) + len(outs) != len(args) or "" in outs:
        raise UsageError(args, USAGE)
    page, figures = write_report(Path(words[0]), Path(outs[0]) if outs else None)
    said = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(printable(f"{page}: {said}"))
    return 0
