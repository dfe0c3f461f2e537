"""State of the host: what a checkpoint has besides arrays and recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le, MaxLen

from pipeline.core.errors import printable

MAX_COUNT = 2**31 - 1
"""Largest step: steps are counted in 32 bits."""
LOGS = "logs"
"""Key of `HostState.logs` in JSON."""
MAX_RATE = 3.4028234663852886e38
"""The largest float32."""
Count = Annotated[int, Ge(0), Le(MAX_COUNT)]
Line = Annotated[str, MaxLen(1000)]
Rate = Annotated[float, Ge(0), Le(MAX_RATE)]


@dataclass(frozen=True)
class EarlyStopState:
    """The best value of the early-stop metric, and the number of evaluations since that value."""

    best: float | None = None
    """None before the first evaluation."""
    waited: Count = 0


@dataclass(frozen=True)
class PendingBoundary:
    """A boundary whose evaluation was interrupted."""

    loss: float | None
    """The last loss of training before the boundary."""
    verdict: Line | None
    """Reason for which the pruner ends the run at the boundary; None: the run continues."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "verdict", self.verdict and printable(self.verdict))


@dataclass(frozen=True)
class SinkState:
    """The fastest sinks as measured; `size` is in steps, None if steps are faster without sinks."""

    size: Annotated[int, Ge(1), Le(MAX_COUNT)] | None
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
        object.__setattr__(self, "stop", self.stop and printable(self.stop))

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Self:
        """Return the requests whose `asdict` is this JSON object."""
        return cls(
            tree["stop"],
            tuple(RateChange(**change) for change in tree["rates"]),
            tuple(tree["evaluate_at"]),
            tuple(tree["save_at"]),
        )


@dataclass(frozen=True)
class CallbackState:
    """The states of callbacks, and their requests."""

    states: Mapping[str, Any] = field(default_factory=dict)
    """JSON by callback; checked by the callbacks."""
    granted: Requests = Requests()
    """Requests that a boundary has put into effect, or has accepted for a later step."""
    asked: Requests = Requests()
    """Requests that no boundary has seen yet. They take effect at the next boundary."""
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
    """Marks of metrics.jsonl and evals.jsonl: their state at the checkpoint, by file name. They are
    checked when the logs are opened."""
