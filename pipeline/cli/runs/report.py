"""`python -m pipeline report RUN_DIR ...`: what networks get right and wrong, as one page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import UsageError, printable
from pipeline.core.reporter import Reporter
from pipeline.inspect.report.suspicious_labels import SUSPICIOUS
from pipeline.inspect.report.write_report import write_report


def main(run_dirs: Sequence[Path], out: Path | None = None) -> CommandResult:
    """Write the report of a run or an ensemble into the folder `out`, and print its main figures.

    Raises UsageError for several runs without `out`, RecipeError and DataError if a run or its data
    can't be read, RunError if the folder can't be written.
    """
    if len(run_dirs) > 1 and out is None:
        raise UsageError(list(map(str, run_dirs)), "several runs need --out FOLDER")
    report = write_report(run_dirs, out)
    text = ", ".join(f"{name} {value}" for name, value in report.figures.items())
    print(printable(f"{report.page}: {text}"))
    warning = {} if report.warning is None else {"warning": report.warning}
    if report.warning is not None:
        Reporter().warn(f"{SUSPICIOUS}: {report.warning}")
    return CommandResult({"page": str(report.page), **report.figures, **warning})
