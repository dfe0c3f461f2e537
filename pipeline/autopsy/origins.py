"""Where values that are not finite come from: a graph that leads back to what made them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from pipeline.autopsy.ranges import Range

COLUMN = "input column"
"""The kind of a tensor that is a column of the dataset."""

MOVES = frozenset(
    {
        "broadcast_in_dim",
        "concatenate",
        "copy",
        "dynamic_update_slice",
        "gather",
        "max",
        "pad",
        "reduce_max",
        "reduce_window_max",
        "reshape",
        "scatter",
        "select_n",
    }
)
"""Primitives that pass minus infinity on as it was meant, such as the padding of a maximum or
the mask of a softmax."""


@dataclass(frozen=True)
class NamedTensor:
    """A tensor that has a name: its kind, such as parameter, and what it is called."""

    kind: str
    name: str


@dataclass(frozen=True)
class Operand:
    """What an equation read; `source` is its name, or the layer and primitive that made it."""

    source: str
    range: Range
    named: NamedTensor | None = None


@dataclass(frozen=True, eq=False)
class Origin:
    """A value that is not finite, by the equation that made it; number -1 is an input.

    `causes` are the origins of what the equation read. Where there are none, or it makes NaN of
    infinities, there is more to know: its result, as it is and in numbers, and its operands.
    """

    number: int
    """The place in the order of execution."""
    primitive: str
    scope: str
    has_nan: bool
    causes: tuple[Origin, ...] = ()
    result: Range | None = None
    operands: tuple[Operand, ...] = ()
    array: Any = None
    iteration: int = 0
    """Of the outermost loop that it ran in."""
    named: NamedTensor | None = None
    intended: bool = False
    """Whether it hands on an infinite constant, as padding and masks do."""

    @property
    def makes_nan(self) -> bool:
        """Whether it gives NaN and reads none."""
        return self.has_nan and not any(cause.has_nan for cause in self.causes)


@dataclass(frozen=True)
class Cause:
    """What made a value not finite; `reader` is the first equation that read an input."""

    origin: Origin
    reader: Origin | None = None

    @property
    def number(self) -> int:
        """When it came into play."""
        return self.origin.number if self.reader is None else self.reader.number


@dataclass
class _Found:
    certain: list[Cause] = field(default_factory=list)
    nan_of_inf: list[Cause] = field(default_factory=list)
    intended: list[Cause] = field(default_factory=list)


def first_cause(outcome: Origin) -> Cause:
    """What first made a value not finite, of all that it was computed from.

    Infinite constants are mostly meant (padding, masks). They count only where nothing else is to
    blame, and then what made NaN of them does first.
    """
    found = _Found()
    for origin, reader in _ancestors(outcome):
        cause = Cause(origin, reader if origin.number < 0 else None)
        if origin.causes:
            if origin.makes_nan:
                found.nan_of_inf.append(cause)
        elif origin.intended:
            found.intended.append(cause)
        else:
            found.certain.append(cause)
    best = found.certain or found.nan_of_inf or found.intended
    return min(best, key=lambda cause: cause.number)


def _ancestors(outcome: Origin) -> Iterator[tuple[Origin, Origin]]:
    """Every origin behind an outcome, itself among them, each with the first that read it."""
    readers: dict[Origin, Origin] = {outcome: outcome}
    waiting = [outcome]
    while waiting:
        reader = waiting.pop()
        for origin in reader.causes:
            known = readers.get(origin)
            if known is None:
                waiting.append(origin)
            if known is None or reader.number < known.number:
                readers[origin] = reader
    yield from readers.items()
