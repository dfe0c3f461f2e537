"""The size of dispatches: how many steps the device is given at once."""

from __future__ import annotations

from dataclasses import dataclass

LEAST_S = 1e-9
"""Least time of a step, in seconds: a clock may stand still for a short dispatch."""


@dataclass
class DispatchSize:
    """As many steps (or batches of an evaluation) as fit into `dispatch_s` seconds.

    The host looks for signals between dispatches, so none may take much longer.
    """

    dispatch_s: float
    step_s: float | None = None
    """Seconds per step of the newest dispatch."""

    def take_note(self, steps: int, seconds: float) -> None:
        """Record that a dispatch of `steps` steps took `seconds`."""
        self.step_s = seconds / steps

    @property
    def max_steps(self) -> int:
        """Steps that fit into a dispatch; 1 before the first, whose time is not known yet."""
        if self.step_s is None:
            return 1
        return max(1, int(self.dispatch_s / max(self.step_s, LEAST_S)))
