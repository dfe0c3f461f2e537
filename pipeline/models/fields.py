"""Types of the fields of layers, with one sentence each for what they take."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt, Strict

from pipeline.registry import Expected

CLASSES = "$classes"

Features = Annotated[
    PositiveInt | Literal["$classes"], Expected(f"a whole number above 0, or {CLASSES}")
]
"""How many features a layer gives; `$classes` stands for the dataset's number of classes."""

Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    Expected("a whole number above 0, or [height, width]"),
]

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid"] | NonNegativeInt | Annotated[tuple[Edges, Edges], Strict(False)],
    Expected("same, valid, a whole number or [[top, bottom], [left, right]]"),
]
"""`same` gives ceil(size / stride) positions, `valid` adds nothing."""
