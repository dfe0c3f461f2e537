"""compiled.json: figures of programs that were compiled for a chip that is not there."""

from __future__ import annotations

from pathlib import Path

from pipeline.backends.base import CompileReport
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.strict_json import json_text
from pipeline.stages.record.run_directory import COMPILED


def write_figures(run_dir: Path, report: CompileReport) -> None:
    """Write the figures of each program that has some; no file where none has."""
    figures = {
        program.name: {"compile_s": program.compile_s, **program.figures}
        for program in report.programs
        if program.figures is not None
    }
    if figures:
        write_whole(run_dir / COMPILED, json_text(figures, indent=1) + "\n")
