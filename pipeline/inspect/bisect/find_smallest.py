"""Search for the smallest set of changes that turns one result into another.

It relies on two facts of bits: what a change does isn't undone by further ones, and two changes
that each matter don't make up for each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, TypeVar

T = TypeVar("T")
Outcome = Literal["good", "bad", "other"]
"""Whether a mixture has the numbers of the good run, of the bad one, or neither's."""
Probe = Callable[[Sequence[T]], Outcome]
"""Returns the outcome of the good run with some of the changes."""


def find_smallest(changes: Sequence[T], probe: Probe[T]) -> list[T]:
    """Return the smallest set of changes with which the good run has the bad run's numbers.

    All of `changes` together must have the outcome bad, and none of them good. For a set of one
    change among n, `probe` is called ceil(log2 n) times, and at most 2 ceil(log2 n) + 1 times for
    one of two.
    """
    required: list[T] = []
    candidates = list(changes)
    while candidates:
        if required and probe(required) == "bad":
            break
        # Of the first `low` candidates too few turn the result, of the first `high` enough.
        low, high, harmless = 0, len(candidates), 0
        while high - low > 1:
            middle = (low + high) // 2
            outcome = probe([*candidates[:middle], *required])
            if outcome == "bad":
                high = middle
            else:
                low = middle
            if outcome == "good":
                harmless = middle
        required.insert(0, candidates[high - 1])
        if harmless == high - 1 and len(required) == 1:
            break
        candidates = candidates[harmless : high - 1]
    return required
