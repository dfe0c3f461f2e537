"""State of the host: what a checkpoint keeps besides arrays, checked by type when it is read.

A checkpoint may come from a stranger, with a manifest to match: what this program would not write
is refused here. Keys of other versions are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from pipeline.backends.base import Mechanism
from pipeline.core.errors import printable
from pipeline.core.files.error_text import show
from pipeline.core.registry import MAX_FLOAT

MOST = 2**31 - 1
"""Steps are counted in 32 bits."""
LOGS = "logs"
"""Key of the marks of the logs."""
T = TypeVar("T")


def _integer(value: Any, least: int = 0) -> int:
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError("must be an integer")
    return value


def _size(value: Any) -> int:
    return _integer(value, 1)


def _number(value: Any) -> float:
    if type(value) not in (int, float):
        raise ValueError("must be a number")
    return float(value)


def _rate(value: Any) -> float:
    if not 0 <= _number(value) <= MAX_FLOAT:
        raise ValueError("must be from 0 to the most of float32")
    return float(value)


def _line(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 1000:
        raise ValueError("must be a line of text")
    return printable(value)


Count = Annotated[int, _integer]
Size = Annotated[int, _size]
Value = Annotated[float, _number]
Rate = Annotated[float, _rate]
Line = Annotated[str, _line]


@dataclass(frozen=True)
class KeptEarlyStop:
    """The best value of the metric that training may stop by, and the evaluations since."""

    best: Value | None = None
    waited: Count = 0


@dataclass(frozen=True)
class PendingBoundary:
    """A boundary whose evaluation was interrupted, and what was known there."""

    loss: Value | None
    verdict: Line | None
    """Why the pruner ends the run there, as the end of the sink has decided; None: it goes on."""


@dataclass(frozen=True)
class KeptSink:
    """The sinks that were chosen."""

    size: Size | None
    mechanism: Mechanism


@dataclass(frozen=True)
class RateChange:
    """A change of the learning rates that a callback asked for: of all updates to come.

    Raises ValueError unless it is either a rate or a factor.
    """

    rate: Rate | None = None
    """The rate that is set; None if the schedule is multiplied."""
    factor: Rate | None = None

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.factor is None):
            raise ValueError("must have either a rate or a factor")


@dataclass(frozen=True)
class Requests:
    """Requests of callbacks."""

    stop: Line | None = None
    """Why training is to end."""
    rates: tuple[RateChange, ...] = ()
    evaluate_at: tuple[Count, ...] = ()
    save_at: tuple[Count, ...] = ()


@dataclass(frozen=True)
class KeptCallbacks:
    """The states of callbacks, and their requests."""

    states: Mapping[str, Any] = field(default_factory=dict)
    """JSON by callback; checked by the callbacks."""
    granted: Requests = Requests()
    """In effect since a boundary, or at a step that lies ahead."""
    asked: Requests = Requests()
    """To take effect at the next boundary."""
    scalars: Mapping[str, Value | None] = field(default_factory=dict)
    """Logged since the last boundary."""


@dataclass(frozen=True)
class HostState:
    """Everything that a resumed run continues with, besides the arrays."""

    early_stop: KeptEarlyStop = KeptEarlyStop()
    unfinished_boundary: PendingBoundary | None = None
    """Set where the evaluation of the step was interrupted."""
    rollbacks: tuple[tuple[Count, Count], ...] = ()
    """Pairs of a bad step and the boundary that the run has gone back to."""
    sink: KeptSink | None = None
    callbacks: KeptCallbacks = field(default_factory=KeptCallbacks)
    logs: Mapping[str, Any] = field(default_factory=dict)
    """Marks of metrics.jsonl and evals.jsonl; checked where the logs are opened."""


def parse_host_state(data: Any) -> HostState:
    """Parse the JSON that a checkpoint keeps of the host. Raises ValueError naming a key."""
    return parse_kept(HostState, data)


def parse_kept(kind: type[T], data: Any) -> T:
    """Parse the JSON of a dataclass of this module. Raises ValueError naming a key."""
    parsed: T = _parse(kind, data, "")
    return parsed


def _parse(kind: Any, data: Any, key: str) -> Any:
    """Parse JSON by a type. Raises ValueError naming the key."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return data
    if origin in (Union, UnionType):
        (kind,) = (argument for argument in arguments if argument is not NoneType)
        return None if data is None else _parse(kind, data, key)
    if origin is Annotated:
        return _convert(arguments[1], data, data, key)
    if origin is Literal and data in arguments:
        return data
    if origin is tuple and isinstance(data, list | tuple):
        return _parse_tuple(arguments, data, key)
    if isinstance(data, dict):
        if origin is Mapping:
            values = data.items()
            return {name: _parse(arguments[1], value, _join(key, name)) for name, value in values}
        return _parse_fields(kind, data, key)
    raise _refusal(key, data)


def _parse_tuple(kinds: tuple[Any, ...], data: Any, key: str) -> tuple[Any, ...]:
    if kinds[-1] is Ellipsis:
        kinds = kinds[:1] * len(data)
    if len(data) > len(kinds):
        raise _refusal(key, data)
    if len(data) < len(kinds):
        raise ValueError(f"{_join(key, len(data))} is missing")
    items = enumerate(zip(kinds, data, strict=True))
    return tuple(_parse(kind, item, _join(key, index)) for index, (kind, item) in items)


def _parse_fields(kind: Any, data: Mapping[str, Any], key: str) -> Any:
    types = get_type_hints(kind, include_extras=True)
    values = {}
    for entry in fields(kind):
        name = _join(key, entry.name)
        if entry.name in data:
            values[entry.name] = _parse(types[entry.name], data[entry.name], name)
        elif entry.default is MISSING and entry.default_factory is MISSING:
            raise ValueError(f"{name} is missing")
    return _convert(lambda values: kind(**values), values, data, key)


def _convert(convert: Callable[[Any], Any], value: Any, data: Any, key: str) -> Any:
    try:
        return convert(value)
    except (ValueError, OverflowError) as error:
        raise _refusal(key, data) from error


def _join(key: str, name: str | int) -> str:
    return f"{key}.{name}" if key else str(name)


def _refusal(key: str, data: Any) -> ValueError:
    return ValueError(f"{key or 'all'} = {show(data)}")
