"""State of the host: what a checkpoint keeps besides arrays, checked by type when it is read.

A checkpoint may be a stranger's, with a manifest to match: what is not as this program writes it
gets no further than here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from pipeline.backends.base import Mechanism
from pipeline.errors import printable
from pipeline.files.error_text import show

MOST = 2**31 - 1
"""Steps are counted in 32 bits."""
Count = Annotated[int, Field(strict=True, ge=0, le=MOST)]
Line = Annotated[str, Field(strict=True, max_length=1000), AfterValidator(printable)]
Value = Annotated[float, Field(strict=True)]


class Kept(BaseModel):
    """Part of what is kept. Keys of other versions are passed over."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class KeptEarlyStop(Kept):
    """The best value of the metric that training may stop by, and the evaluations since."""

    best: Value | None = None
    waited: Count = 0


class GivenUp(Kept):
    """Evaluation that was given up, and what was known at its boundary."""

    loss: Value | None
    verdict: Line | None
    """What the end of the sink there has decided."""


class KeptSink(Kept):
    """Sinks that were chosen."""

    size: Annotated[int, Field(strict=True, ge=1, le=MOST)] | None
    mechanism: Mechanism


class HostState(Kept):
    """What a resumed run goes on with, besides the arrays."""

    early_stop: KeptEarlyStop = KeptEarlyStop()
    unfinished_boundary: GivenUp | None = None
    """Where the evaluation of the step was given up."""
    rollbacks: tuple[tuple[Count, Count], ...] = ()
    """Bad steps, and where the run has gone back to at each."""
    sink: KeptSink | None = None
    logs: Mapping[str, Any] = {}
    """Marks of metrics.jsonl and evals.jsonl; whoever reads the logs checks them."""


def parse_host_state(data: Any) -> HostState:
    """Return what the JSON of a checkpoint says of the host. Raises ValueError naming a key."""
    try:
        return HostState.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        if first["type"] == "missing":
            raise ValueError(f"{key} is missing") from error
        raise ValueError(f"{key or 'all'} = {show(first['input'])}") from error
