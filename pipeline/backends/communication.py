"""Modelled communication of emulated devices in one step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Communication:
    """Modelled all-reduces of the gradients in one step of several devices.

    `count` all-reduces of `nbytes` in all take `all_reduce_ms`. For `exposed_ms` of a step of
    `step_ms` nothing is computed, as an all-reduce or its launch is waited for.
    """

    devices: int
    count: int
    nbytes: int
    all_reduce_ms: float
    exposed_ms: float
    step_ms: float

    @property
    def share(self) -> float:
        """Share of the step that no computation hides."""
        return self.exposed_ms / self.step_ms

    def __str__(self) -> str:
        several = "" if self.count == 1 else f" in {self.count}"
        return (
            f"{self.nbytes / 1e6:,.1f} MB{several} over {self.devices:,} devices: "
            f"{self.all_reduce_ms:,.2f} ms; with launches {self.exposed_ms:,.2f} ms are exposed, "
            f"{self.share:.1%} of the step"
        )
