"""Search for the smallest set of changes that turns one result into another.

It relies on one fact of bits: what some changes do isn't undone by further ones. Changes may act
only together, so a set without an effect may have a part of the smallest set.
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

    All of `changes` together must have the outcome bad, and none of them good. For a set of k
    changes among n, `probe` is called at most k (ceil(log2 n) + 1) times.
    """
    required: list[T] = []
    candidates = list(changes)
    while candidates:
        if required and probe(required) == "bad":
            break
        # Of the first `low` candidates too few turn the result, of the first `high` enough.
        low, high = 0, len(candidates)
        while high - low > 1:
            middle = (low + high) // 2
            if probe([*candidates[:middle], *required]) == "bad":
                high = middle
            else:
                low = middle
        required.insert(0, candidates[high - 1])
        candidates = candidates[: high - 1]
    return required
