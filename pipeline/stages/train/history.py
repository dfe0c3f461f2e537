"""History: what became of a run."""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

from pipeline.observe.monitors import Evaluation

DISPATCHES_KEPT = 4096
"""Of so many the median is taken: runs of millions of dispatches take no more memory."""


@dataclass
class History:
    """What became of a run."""

    step: int
    status: Literal["done", "stopped", "pruned"] = "done"
    reason: str | None = None
    left_out: int = 0
    """Steps that have no update, or none any more, because of a bad step."""
    loss: float | None = None
    train_s: float = 0.0
    """From the first dispatch to the last save, evaluations and all."""
    first_dispatch_s: float | None = None
    first_step_at: float | None = None
    """When the first dispatch ended, by `time.perf_counter`."""
    step_seconds: deque[float] = field(default_factory=partial(deque, maxlen=DISPATCHES_KEPT))
    """Seconds per step of the newest dispatches, the first of all left out."""
    evaluated: dict[int, Evaluation] = field(default_factory=dict)
    """The last evaluation by its step."""

    @property
    def step_ms(self) -> float | None:
        """The median time of a step over the newest dispatches."""
        return 1000 * statistics.median(self.step_seconds) if self.step_seconds else None

    @property
    def newest_step_s(self) -> float | None:
        """What a step took in the newest dispatch."""
        return self.step_seconds[-1] if self.step_seconds else self.first_dispatch_s

    def add_dispatch(self, steps: int, seconds: float, ended_at: float) -> None:
        """A dispatch of so many steps took so long, and ended at this `time.perf_counter`."""
        if self.first_dispatch_s is None:
            self.first_dispatch_s, self.first_step_at = seconds, ended_at
        else:
            self.step_seconds.append(seconds / steps)
