"""Origins of values that are not finite: a graph that leads back to the first cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pipeline.backends.graph.replay.ranges import Range

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
"""Primitives that pass on intended minus infinities, such as the padding of a maximum or the mask
of a softmax."""


@dataclass(frozen=True)
class NamedTensor:
    """The name of a tensor with its kind, such as parameter."""

    kind: str
    name: str


@dataclass(frozen=True)
class Operand:
    """An operand of an equation; `source` is its name, or the layer and primitive it is from."""

    source: str
    range: Range
    named: NamedTensor | None = None


@dataclass(frozen=True, eq=False)
class Origin:
    """The equation that produced a value that is not finite; number -1 is an input.

    `causes` are the origins of its operands. Where there are none, or it turns infinities into NaN,
    its result, as array and as range, and its operands are recorded too.
    """

    number: int
    """The position in the order of execution."""
    primitive: str
    scope: str
    has_nan: bool
    causes: tuple[Origin, ...] = ()
    result: Range | None = None
    operands: tuple[Operand, ...] = ()
    array: Any = None
    iteration: int = 0
    """Iteration of the outermost loop that it ran in."""
    named: NamedTensor | None = None
    line: str = ""
    """The line of custom code that made the equation, if its result is recorded."""
    intended: bool = False
    """Whether it passes on an infinite constant, as padding and masks do."""

    @property
    def makes_nan(self) -> bool:
        """Whether it produces NaN without reading any."""
        return self.has_nan and not any(cause.has_nan for cause in self.causes)


@dataclass(frozen=True)
class Cause:
    """The cause of a value that is not finite; `reader` is the first equation to read an input."""

    origin: Origin
    reader: Origin | None = None

    @property
    def number(self) -> int:
        """The position in the order of execution at which it took effect."""
        return self.origin.number if self.reader is None else self.reader.number


def first_cause(outcome: Origin) -> Cause:
    """The first cause of a value that isn't finite, among all values that it depends on.

    Infinite constants are mostly intended (padding, masks). They are a cause only without any
    other, and equations that turn them into NaN come before them.
    """
    first_readers = {outcome: outcome}
    waiting = [outcome]
    while waiting:
        reader = waiting.pop()
        for origin in reader.causes:
            if origin not in first_readers:
                waiting.append(origin)
                first_readers[origin] = reader
            elif reader.number < first_readers[origin].number:
                first_readers[origin] = reader
    certain: list[Cause] = []
    nan_of_inf: list[Cause] = []
    intended: list[Cause] = []
    for origin, reader in first_readers.items():
        cause = Cause(origin, reader if origin.number < 0 else None)
        if not origin.causes:
            (intended if origin.intended else certain).append(cause)
        elif origin.makes_nan:
            nan_of_inf.append(cause)
    return min(certain or nan_of_inf or intended, key=lambda cause: cause.number)
