"""State of the host: what a checkpoint keeps besides arrays, checked by type when it is read.

A checkpoint may come from a stranger, with a manifest to match: what this program would not write
is refused here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.backends.base import Mechanism
from pipeline.core.errors import printable
from pipeline.core.files.error_text import show
from pipeline.core.registry import MAX_FLOAT

MOST = 2**31 - 1
"""Steps are counted in 32 bits."""
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Line = Annotated[str, Field(strict=True, max_length=1000), AfterValidator(printable)]
Value = Annotated[float, Field(strict=True)]
Rate = Annotated[float, Field(strict=True, ge=0, le=MAX_FLOAT)]


class Kept(BaseModel):
    """Base of what is kept. Keys of other versions are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class KeptEarlyStop(Kept):
    """The best value of the metric that training may stop by, and the evaluations since."""

    best: Value | None = None
    waited: Count = 0


class PendingBoundary(Kept):
    """A boundary whose evaluation was interrupted, and what was known there."""

    loss: Value | None
    verdict: Line | None
    """Why the pruner ends the run there, as the end of the sink has decided; None: it goes on."""


class KeptSink(Kept):
    """The sinks that were chosen."""

    size: Annotated[int, Field(strict=True, ge=1, le=MOST)] | None
    mechanism: Mechanism


class RateChange(Kept):
    """A change of the learning rates that a callback asked for: of all updates to come."""

    rate: Rate | None = None
    """The rate that is set; None where the schedule is multiplied."""
    factor: Rate | None = None

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.rate is None) == (self.factor is None):
            raise ValueError("must have either a rate or a factor")
        return self


class Requests(Kept):
    """Requests of callbacks."""

    stop: Line | None = None
    """Why training is to end."""
    rates: tuple[RateChange, ...] = ()
    evaluate_at: tuple[Count, ...] = ()
    save_at: tuple[Count, ...] = ()


class KeptCallbacks(Kept):
    """The states of callbacks, and their requests."""

    states: Mapping[str, Any] = {}
    """JSON by callback; checked by the callbacks."""
    granted: Requests = Requests()
    """In effect since a boundary, or at a step that lies ahead."""
    asked: Requests = Requests()
    """To take effect at the next boundary."""
    scalars: Mapping[str, Value | None] = {}
    """Logged since the last boundary."""


class HostState(Kept):
    """Everything that a resumed run continues with, besides the arrays."""

    early_stop: KeptEarlyStop = KeptEarlyStop()
    unfinished_boundary: PendingBoundary | None = None
    """Set where the evaluation of the step was interrupted."""
    rollbacks: tuple[tuple[Count, Count], ...] = ()
    """Pairs of a bad step and the boundary that the run has gone back to."""
    sink: KeptSink | None = None
    callbacks: KeptCallbacks = KeptCallbacks()
    logs: Mapping[str, Any] = {}
    """Marks of metrics.jsonl and evals.jsonl; checked where the logs are opened."""


def parse_host_state(data: Any) -> HostState:
    """Parse the JSON that a checkpoint keeps of the host. Raises ValueError naming a key."""
    try:
        return HostState.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(first['input'])}") from error
