"""`python -m pipeline report RUN_DIR`: what a trained network gets right and wrong, as one page."""

from __future__ import annotations

from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.core.errors import printable
from pipeline.inspect.report.write_report import write_report


def main(run_dir: Path, out: Path | None = None) -> CommandResult:
    """Write the report of a run into the folder `out`, and print its main figures.

    Raises RecipeError and DataError if the run or its data can't be read, RunError if the folder
    can't be written.
    """
    page, figures = write_report(run_dir, out)
    text = ", ".join(f"{name} {value}" for name, value in figures.items())
    print(printable(f"{page}: {text}"))
    return CommandResult({"page": str(page), **figures})
