"""`python -m pipeline diff RUN_A RUN_B`: what sets two runs apart, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.differences import Difference
from pipeline.errors import RecipeError
from pipeline.observe.comparison import Comparison, compare_steps
from pipeline.observe.metrics_log import METRICS
from pipeline.observe.run_record import (
    RunRecord,
    compare_origins,
    compare_outcomes,
    read_record,
)
from pipeline.problems import show

USAGE = "diff takes RUN_A RUN_B"
DIGEST = 12
"""So many digits of a checksum are shown."""


def diff(args: Sequence[str]) -> int:
    """Print the differences of two runs; the exit status is 0, also where there are none.

    Raises RecipeError for other arguments, DataError where a run can't be read.
    """
    if len(args) != 2 or any(arg.startswith("-") for arg in args):
        raise RecipeError([f"{' '.join(args) or 'nothing'}: {USAGE}"])
    one, other = (read_record(Path(arg)) for arg in args)
    console = Console(highlight=False, markup=False)
    for letter, record in zip("AB", (one, other), strict=True):
        console.print(f"{letter}  {describe(record)}", soft_wrap=True)
    show_origins(console, one, other)
    show_section(console, "outcome", compare_outcomes(one, other))
    logs = [record.run_dir / METRICS for record in (one, other)]
    if all(log.exists() for log in logs):
        console.print(f"steps        {describe_steps(compare_steps(*logs))}", soft_wrap=True)
    return 0


def describe(record: RunRecord) -> str:
    """A run in one line."""
    steps = record.summary.get("steps")
    done = f", {steps:,} steps" if isinstance(steps, int) else ""
    several = f", by {len(record.processes)} processes" if len(record.processes) > 1 else ""
    return f"{record.run_dir}: {record.status}{done}{several}"


def show_origins(console: Console, one: RunRecord, other: RunRecord) -> None:
    """Print where recipe, data, code and environment differ, a table for each."""
    for section, found in compare_origins(one, other).items():
        show_section(console, section, found)


def show_section(console: Console, section: str, found: list[Difference] | None) -> None:
    """Print differences as a table; a line where there are none, or it can't be told (None)."""
    if not found:
        said = "the same" if found is not None else "not kept by both runs"
        console.print(f"{section:<12} {said}", soft_wrap=True)
        return
    table = Table(section, "A", "B", "B against A", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for difference in found:
        one, other = difference.one, difference.other
        table.add_row(difference.key, _cell(one), _cell(other), _change(one, other))
    console.print(table)


def describe_steps(found: Comparison) -> str:
    """Two logs of steps in a line or two."""
    alone = [("A", found.only_one), ("B", found.only_other)]
    more = [f"{letter} has {steps:,} more" for letter, steps in alone if steps]
    if found.first is None:
        return "; ".join([f"{found.steps:,} are the same, bit for bit", *more])
    said = [f"{found.differing:,} of {found.steps:,} differ, from {found.first}"]
    if found.first_loss not in (None, found.first):
        said.append(f"the losses from {found.first_loss}")
    if found.largest_loss not in (None, found.first_loss):
        said.append(f"furthest apart at {found.largest_loss}")
    return "; ".join([*said, *more])


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():
        return value[:DIGEST]
    return f"{value:,.6g}" if isinstance(value, float) else show(value)


def _change(one: Any, other: Any) -> str:
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in (one, other))
    return f"{other / one - 1:+.2%}" if numbers and one else ""
