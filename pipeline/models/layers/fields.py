"""Types of the fields of layers, with the expected values for error messages."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, Strict

from pipeline.core.registry import Expected

CLASSES = "$classes"

Features = Annotated[
    PositiveInt | Literal["$classes"], Expected(f"a whole number above 0, or {CLASSES}")
]
"""Number of features of a layer's output; `$classes` is the dataset's number of classes."""


def map_texts(change: Callable[[str], Any], value: Any) -> Any:
    """Apply `change` to the texts in nested values; tuples become lists."""
    if isinstance(value, Mapping):
        return {key: map_texts(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [map_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value


def replace_classes(value: Any, classes: int) -> Any:
    """Return nested values with the number of classes for `$classes`; tuples become lists."""
    return map_texts(lambda text: classes if text == CLASSES else text, value)


Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [height, width]"),
]

VolumeSize = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [depth, height, width]"),
]


def pair(size: Size) -> tuple[int, int]:
    """Return a size as height and width."""
    return (size, size) if isinstance(size, int) else size


def triple(size: VolumeSize) -> tuple[int, int, int]:
    """Return a size as depth, height and width."""
    return (size, size, size) if isinstance(size, int) else size


Count = Annotated[PositiveInt, Field(le=1000)]
"""Number of repetitions of layers, limited because each repetition is traced."""

AdaptiveSize = Annotated[
    Count | Annotated[tuple[Count, Count], Strict(False)],
    Expected("a whole number from 1 to 1000, or [height, width]"),
]

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid", "symmetric"]
    | NonNegativeInt
    | Annotated[tuple[Edges, Edges], Strict(False)],
    Expected("same, valid, symmetric, a whole number or [[top, bottom], [left, right]]"),
]
"""same: ceil(size / stride) results; valid: no padding; a number: that many zeros on each side;
symmetric: (window - 1) // 2 zeros on each side. symmetric differs from same for even windows, and
for a stride above 1 at even sizes."""
