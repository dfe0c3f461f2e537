"""Flaws of a run's log: missing and changed lines, found when the run is resumed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

MAX_RANGES = 20
"""Most ranges of steps that are listed; the number of missing lines has no limit."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Flaws:
    """Differences of a log from what was written into it; later checkpoints keep them too.

    `missing` are ranges of steps, both ends included; `missing_lines` counts all lines that are not
    there. A log that is not `verified` may have lines that differ from what was written.
    """

    missing: Ranges = ()
    missing_lines: int = 0
    verified: bool = True

    def __bool__(self) -> bool:
        return not self.verified or self.missing_lines > 0

    def __str__(self) -> str:
        if not self.missing_lines:
            return "some of its lines are not as they were written"
        count = "a line is" if self.missing_lines == 1 else f"{self.missing_lines:,} lines are"
        shown = f": {steps_text(self.missing)}" if self.missing else ""
        more = ", ..." if len(self.missing) == MAX_RANGES else ""
        return f"{count} missing{shown}{more}"

    def to_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


WHOLE = Flaws()


def read_flaws(tree: Any) -> Flaws:
    """Parse the flaws in a checkpoint. Raises ValueError where they are invalid."""
    if not isinstance(tree, Mapping):
        raise ValueError("flaws must be a section")
    ranges, lines, verified = (tree.get(name) for name in ("missing", "missing_lines", "verified"))
    if not isinstance(ranges, Sequence) or isinstance(ranges, str) or len(ranges) > MAX_RANGES:
        raise ValueError("the missing steps must be a short list")
    if type(lines) is not int or lines < 0 or not isinstance(verified, bool):
        raise ValueError("the count of missing lines must be a whole number")
    if not all(_is_range(one) for one in ranges):
        raise ValueError("a range of steps must be two whole numbers")
    return Flaws(tuple((one[0], one[1]) for one in ranges), lines, verified)


def _is_range(tree: Any) -> bool:
    is_pair = isinstance(tree, Sequence) and not isinstance(tree, str) and len(tree) == 2
    return is_pair and all(type(step) is int for step in tree)


def with_gap(flaws: Flaws, first: int, last: int) -> Flaws:
    """Return the flaws with the steps from `first` to `last` missing too."""
    ranges = (*flaws.missing, (first, last))[:MAX_RANGES]
    return replace(flaws, missing=ranges, missing_lines=flaws.missing_lines + last - first + 1)


def ranges_of(steps: Sequence[int]) -> Ranges:
    """Return ascending steps as ranges, at most `MAX_RANGES`."""
    return tuple(_ranges(steps))[:MAX_RANGES]


def _ranges(steps: Sequence[int]) -> Iterator[tuple[int, int]]:
    start = 0
    for place in range(1, len(steps) + 1):
        if place == len(steps) or steps[place] != steps[place - 1] + 1:
            yield steps[start], steps[place - 1]
            start = place


def steps_text(ranges: Ranges) -> str:
    """Return ranges of steps for the user: `step 3, steps 7 to 9`."""
    return ", ".join(f"step {a}" if a == b else f"steps {a} to {b}" for a, b in ranges)
