"""Origins of non-finite values: a graph from a result back to the first cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.backends.graph.replay.ranges import Range

COLUMN = "input column"
"""Kind of the tensors that are columns of the dataset."""
MOVES = frozenset(
    {"broadcast_in_dim", "concatenate", "copy", "dynamic_update_slice", "gather", "max", "pad",
     "reduce_max", "reduce_window_max", "reshape", "scatter", "select_n"}
)  # fmt: skip
"""Primitives that pass on intended minus infinities, such as the padding of a maximum or the mask
of a softmax."""


@dataclass(frozen=True)
class NamedTensor:
    """The kind of a tensor, such as "parameter", and its name."""

    kind: str
    name: str


@dataclass(frozen=True)
class Operand:
    """An operand of an equation."""

    source: str
    """Its name, or the primitive and the layer that computed it."""
    range: Range
    named: NamedTensor | None = None


@dataclass(frozen=True, eq=False)
class Origin:
    """The equation that produced a non-finite value, or an input that has one.

    `causes` are the origins of the operands. `result`, `array` and `operands` are recorded only if
    nothing is a cause, or the equation computes NaN from infinities.
    """

    number: int
    """Position in the order of execution; -1 for an input."""
    primitive: str
    scope: str
    has_nan: bool
    causes: tuple[Origin, ...] = ()
    result: Range | None = None
    operands: tuple[Operand, ...] = ()
    array: Any = None
    iteration: int = 0
    """Iteration of the outermost loop around the equation; 0 if none exists."""
    named: NamedTensor | None = None
    line: str = ""
    """The line of the user's code that made the equation, if its result is recorded."""
    intended: bool = False
    """Whether the equation passes on an infinite constant, such as a padding or a mask."""

    @property
    def makes_nan(self) -> bool:
        """Whether the equation produces NaN from values without NaN."""
        return self.has_nan and not any(cause.has_nan for cause in self.causes)


@dataclass(frozen=True)
class Cause:
    """The cause of a non-finite value."""

    origin: Origin
    reader: Origin | None = None
    """The first equation that reads `origin`, if that is an input."""

    @property
    def number(self) -> int:
        """Position in the order of execution of the equation that computed or read the value."""
        return self.origin.number if self.reader is None else self.reader.number


def find_cause(outcome: Origin) -> Cause:
    """Return the first cause of a non-finite value, among all values that it depends on.

    An equation that computes NaN from infinities is the cause only without an unintended cause,
    and an intended infinite constant (padding, mask) only if there is neither.
    """
    first_readers = {outcome: outcome}
    unvisited = [outcome]
    while unvisited:
        reader = unvisited.pop()
        for origin in reader.causes:
            if origin not in first_readers:
                unvisited.append(origin)
                first_readers[origin] = reader
            elif reader.number < first_readers[origin].number:
                first_readers[origin] = reader
    unintended: list[Cause] = []
    nan_makers: list[Cause] = []
    intended: list[Cause] = []
    for origin, reader in first_readers.items():
        cause = Cause(origin, reader if origin.number < 0 else None)
        if origin.causes and origin.makes_nan:
            nan_makers.append(cause)
        elif not origin.causes and origin.intended:
            intended.append(cause)
        elif not origin.causes:
            unintended.append(cause)
    return min(unintended or nan_makers or intended, key=lambda cause: cause.number)
