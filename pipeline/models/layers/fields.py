"""Types of the fields of layers, each with a sentence for error messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, Strict

from pipeline.core.registry import Expected

CLASSES = "$classes"

Features = Annotated[
    PositiveInt | Literal["$classes"], Expected(f"a whole number above 0, or {CLASSES}")
]
"""Number of features of a layer's output; `$classes` is the dataset's number of classes."""

Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [height, width]"),
]


def pair(size: Size) -> tuple[int, int]:
    """A size as height and width."""
    return (size, size) if isinstance(size, int) else size


Count = Annotated[PositiveInt, Field(le=1000)]
"""Number of repetitions of layers, limited because each takes time to trace."""

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid", "symmetric"]
    | NonNegativeInt
    | Annotated[tuple[Edges, Edges], Strict(False)],
    Expected("same, valid, symmetric, a whole number or [[top, bottom], [left, right]]"),
]
"""`same` gives ceil(size / stride) positions, `valid` adds nothing, and `symmetric` puts
(window - 1) // 2 on either side: `same` but for a stride at even sizes, and for even windows."""
