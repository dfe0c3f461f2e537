"""One change of how a step is run, with its predicted gain."""

from __future__ import annotations

from dataclasses import dataclass

DISTINGUISHABLE = 0.01
"""A predicted gain below this is no reason to change anything."""


@dataclass(frozen=True, slots=True)
class Recommendation:
    """One change of how a step is run.

    `override` is the change as a recipe's overrides, `gain` the predicted relative increase of
    samples per second.
    """

    kind: str
    what: str
    override: str
    step_ms: float
    samples_per_s: float
    gain: float

    @property
    def distinguishable(self) -> bool:
        """Whether the gain is large enough to tell it from none."""
        return self.gain >= DISTINGUISHABLE

    def __str__(self) -> str:
        sure = f"{self.gain:+.1%}" if self.distinguishable else "not distinguishable"
        return f"{self.override}: {self.what}, {sure}"
