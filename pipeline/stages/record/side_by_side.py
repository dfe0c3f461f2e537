"""Two runs side by side, for the commands `diff` and `reproduce`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import printable
from pipeline.core.files.error_text import show_name
from pipeline.core.files.tree_diff import Difference
from pipeline.core.files.value_text import show
from pipeline.stages.record.compare_steps import Comparison
from pipeline.stages.record.run_record import RunRecord, compare_origins

SECTION_WIDTH = 12
"""Width of the column of section names, in characters."""
DIGEST_LENGTH = 12
"""Number of digits of a checksum that are shown."""
NOT_RECORDED = "not kept by both runs"


class SideBySide:
    """Printer of the runs A and B: a line for each run, then a section for each comparison."""

    def __init__(self, a: RunRecord, b: RunRecord) -> None:
        self._runs = a, b
        self._console = Console(highlight=False, markup=False)
        for letter, record in zip("AB", self._runs, strict=True):
            steps = record.summary.get("steps")
            steps_text = f", {steps:,} steps" if type(steps) is int else ""
            count = len(record.processes)
            several = f", by {count} processes" if count > 1 else ""
            line = f"{letter}  {record.run_dir}: {show_name(record.status)}{steps_text}{several}"
            self._console.print(printable(line), soft_wrap=True)

    def show_text(self, section: str, text: str) -> None:
        """Print a section of one line."""
        self._console.print(printable(f"{section:<{SECTION_WIDTH}} {text}"), soft_wrap=True)

    def show_differences(self, section: str, differences: Sequence[Difference] | None) -> None:
        """Print a table of differences; a line if there are none, or if they are unknown (None)."""
        if not differences:
            self.show_text(section, NOT_RECORDED if differences is None else "the same")
            return
        table = Table(section, "A", "B", "B against A", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
        for difference in differences:
            a = difference.value
            b = difference.other_value
            table.add_row(
                show_name(difference.key), _format_cell(a), _format_cell(b), _format_change(a, b)
            )
        self._console.print(table)

    def show_origins(self) -> None:
        """Print the differences of recipe, data, code and environment, a section for each."""
        for section, differences in compare_origins(*self._runs).items():
            self.show_differences(section, differences)

    def show_steps(self, comparison: Comparison | None) -> None:
        """Print the comparison of two logs of steps; None if a log is missing."""
        self.show_text("steps", NOT_RECORDED if comparison is None else _format_steps(comparison))


def differences_to_dicts(differences: Sequence[Difference] | None) -> list[dict[str, Any]] | None:
    """Return the differences for JSON; None if they are unknown."""
    if differences is None:
        return None
    return [
        {"key": difference.key, "a": difference.value, "b": difference.other_value}
        for difference in differences
    ]


def _format_steps(comparison: Comparison) -> str:
    num_extra = {"A": comparison.only_one, "B": comparison.only_other}
    extra = [f"{letter} has {steps:,} more" for letter, steps in num_extra.items() if steps]
    if comparison.first is None:
        return "; ".join([f"{comparison.steps:,} are the same, bit for bit", *extra])
    parts = [f"{comparison.differing:,} of {comparison.steps:,} differ, from {comparison.first}"]
    if comparison.first_loss not in (None, comparison.first):
        parts.append(f"the losses from {comparison.first_loss}")
    if comparison.largest_loss not in (None, comparison.first_loss):
        parts.append(f"furthest apart at {comparison.largest_loss}")
    return "; ".join([*parts, *extra])


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, str) and len(value) in (40, 64) and value.isalnum():
        return value[:DIGEST_LENGTH]  # of a commit or a SHA-256
    return f"{value:,.6g}" if isinstance(value, float) else show(value)


def _format_change(a: Any, b: Any) -> str:
    """Return the relative change from `a` to `b`; "" if either isn't a number, or `a` is 0."""
    for value in (a, b):
        if not isinstance(value, int | float) or isinstance(value, bool):
            return ""
    try:
        return f"{b / a - 1:+.2%}" if a else ""
    except OverflowError:  # whole numbers beyond any float
        return ""
