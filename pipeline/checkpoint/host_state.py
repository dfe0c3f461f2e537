"""State of the host, which a checkpoint has besides arrays and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, MaxLen

from pipeline.core.errors import printable

MAX_COUNT = 2**31 - 1
"""Largest step, since a step is an int32."""
MAX_DIGITS = 308
"""An integer of at most this many digits fits into a float64, whose largest is 1.8e308."""
LOGS = "logs"
"""Name of the field `HostState.logs`."""
MAX_RATE = 3.4028234663852886e38
"""The largest float32."""
Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
Line = Annotated[str, MaxLen(1000)]
Rate = Annotated[float, Ge(0), Le(MAX_RATE)]


@dataclass(frozen=True)
class EarlyStopState:
    """Progress of the early-stop metric."""

    best: float | None = None
    """The metric's best value; None before the first evaluation."""
    waited: Count = 0
    """Number of evaluations since the best value."""


@dataclass(frozen=True)
class PendingBoundary:
    """A boundary whose evaluation was interrupted."""

    loss: float | None
    """The last loss of training before the boundary."""
    verdict: Line | None
    """Reason for which the pruner ends the run at the boundary; None: the run continues."""

    def __post_init__(self) -> None:
        if self.verdict is not None:
            object.__setattr__(self, "verdict", printable(self.verdict))


@dataclass(frozen=True)
class SinkState:
    """The kind of sinks that was measured to be the fastest."""

    size: Annotated[int, Ge(1), Le(MAX_COUNT)] | None
    """Steps of a sink; None if single steps are faster than sinks."""
    mechanism: Literal["loop", "soft", "none"]


@dataclass(frozen=True)
class RateChange:
    """A callback's change of the learning rates of all later updates.

    Raises ValueError unless it has either a rate or a factor.
    """

    rate: Rate | None = None
    """New rate; None if the schedule is multiplied."""
    factor: Rate | None = None
    """Factor on the schedule; None if a rate is set."""

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.factor is None):
            raise ValueError("must have either a rate or a factor")


@dataclass(frozen=True)
class Requests:
    """Requests of callbacks: to stop, to change rates, to evaluate and to save at steps."""

    stop: Line | None = None
    """Reason to end training; None: it continues."""
    rates: tuple[RateChange, ...] = ()
    evaluate_at: tuple[Count, ...] = ()
    save_at: tuple[Count, ...] = ()

    def __post_init__(self) -> None:
        if self.stop is not None:
            object.__setattr__(self, "stop", printable(self.stop))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """Return the requests whose `asdict` is this JSON object."""
        return cls(
            stop=tree["stop"],
            rates=tuple(RateChange(**change) for change in tree["rates"]),
            evaluate_at=tuple(tree["evaluate_at"]),
            save_at=tuple(tree["save_at"]),
        )


@dataclass(frozen=True)
class CallbackState:
    """The states of callbacks, and their requests."""

    states: Mapping[str, Any] = field(default_factory=dict)
    """JSON by callback. Each callback checks its state."""
    granted: Requests = Requests()
    """Requests that have taken effect at a boundary, or will at a later step."""
    asked: Requests = Requests()
    """Requests since the last boundary. They take effect at the next boundary."""
    scalars: Mapping[str, float | None] = field(default_factory=dict)
    """Scalars that were logged since the last boundary."""


@dataclass(frozen=True)
class HostState:
    """Everything that a resumed run needs besides the arrays. Unknown keys of JSON are ignored."""

    early_stop: EarlyStopState = EarlyStopState()
    unfinished_boundary: PendingBoundary | None = None
    """Set if the evaluation at the checkpoint's step was interrupted."""
    rollbacks: tuple[tuple[Count, Count], ...] = ()
    """Pairs of a non-finite step and the boundary that the run went back to."""
    sink: SinkState | None = None
    callbacks: CallbackState = CallbackState()
    logs: Mapping[str, Any] = field(default_factory=dict)
    """State of metrics.jsonl and evals.jsonl at the checkpoint, by file name. It is compared with
    the files when they are opened."""
