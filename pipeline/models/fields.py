"""Types of the fields of layers, with one sentence each for what they take."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import GetCoreSchemaHandler, NonNegativeInt, PositiveInt, Strict
from pydantic_core import CoreSchema, core_schema

CLASSES = "$classes"


class _Expected:
    """Says in one sentence what a field of several types takes, instead of once for each type."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        message = f"must be {self.text}"
        return core_schema.custom_error_schema(
            handler(source), "expected", custom_error_message=message
        )


Features = Annotated[
    PositiveInt | Literal["$classes"], _Expected(f"a whole number above 0, or {CLASSES}")
]
"""How many features a layer gives; `$classes` stands for the dataset's number of classes."""

Size = Annotated[
    PositiveInt | Annotated[tuple[PositiveInt, PositiveInt], Strict(False)],
    _Expected("a whole number above 0, or [height, width]"),
]

Edges = Annotated[tuple[NonNegativeInt, NonNegativeInt], Strict(False)]
Padding = Annotated[
    Literal["same", "valid"] | NonNegativeInt | Annotated[tuple[Edges, Edges], Strict(False)],
    _Expected("same, valid, a whole number or [[top, bottom], [left, right]]"),
]
"""`same` gives ceil(size / stride) positions, `valid` adds nothing."""
