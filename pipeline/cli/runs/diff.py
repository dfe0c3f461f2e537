"""`python -m pipeline diff RUN_A RUN_B`: the differences of two runs and of their results."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.engine.monitors.log_lines import METRICS
from pipeline.stages.record.run_record import (
    SideBySide,
    compare_origins,
    compare_outcomes,
    compare_steps,
    differences_to_dicts,
    read_record,
)


def main(run_a: Path, run_b: Path) -> CommandResult:
    """Print the differences of two runs. Raises DataError if a run can't be read."""
    record_a = read_record(run_a)
    record_b = read_record(run_b)
    log_a = record_a.run_dir / METRICS
    log_b = record_b.run_dir / METRICS
    steps = compare_steps(log_a, log_b) if log_a.exists() and log_b.exists() else None
    side_by_side = SideBySide(record_a, record_b)
    side_by_side.show_origins()
    outcomes = compare_outcomes(record_a, record_b)
    side_by_side.show_differences("outcome", outcomes)
    side_by_side.show_steps(steps)
    origins = compare_origins(record_a, record_b).items()
    facts = {
        **{section: differences_to_dicts(differences) for section, differences in origins},
        "outcome": differences_to_dicts(outcomes),
        "steps": None if steps is None else asdict(steps),
    }
    return CommandResult(facts)
