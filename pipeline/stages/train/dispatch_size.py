"""The pace of dispatches: how much work the device is given at once."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 1e-9
"""A clock may stand still for a short piece of work."""


@dataclass
class DispatchSize:
    """Of steps (or batches) one after the other, as many as fit into `dispatch_s` seconds.

    The host looks for signals between dispatches, so none may take much longer.
    """

    dispatch_s: float
    piece_s: float | None = None
    """What one took in the newest dispatch."""

    def take_note(self, pieces: int, seconds: float) -> None:
        """A dispatch of so many took so long."""
        self.piece_s = seconds / pieces

    @property
    def max_steps(self) -> int:
        """How many fit into a dispatch; the first is of a single one, to find out."""
        if self.piece_s is None:
            return 1
        return max(1, int(self.dispatch_s / max(self.piece_s, LEAST_S)))
