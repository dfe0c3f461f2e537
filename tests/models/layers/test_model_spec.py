"""Sizes, features and pads as a recipe writes them."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import TypeAdapter, ValidationError

from pipeline.models.layers.model_spec import (
    Count,
    Features,
    LayerSpec,
    Padding,
    Size,
    count_layers,
    pair,
)
from pipeline.models.layers.standard import Relu, Sequence


def test_size_is_height_and_width() -> None:
    assert pair(3) == (3, 3)
    assert pair(TypeAdapter(Size).validate_python([3, 5])) == (3, 5)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (Size, 0),
        (Size, [3]),
        (Size, [3, -1]),
        (Features, 0),
        (Features, "classes"),
        (Count, 1001),
        (Padding, "full"),
        (Padding, -1),
        (Padding, [[1, 1]]),
        (Padding, [[1, 1], [0, -1]]),
    ],
)
def test_invalid_field_values_are_refused(field: Any, value: Any) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(field).validate_python(value)


@pytest.mark.parametrize(
    ("field", "value", "read"),
    [
        (Features, "$classes", "$classes"),
        (Padding, "same", "same"),
        (Padding, [[1, 0], [2, 3]], ((1, 0), (2, 3))),
    ],
)
def test_valid_field_values_are_parsed(field: Any, value: Any, read: Any) -> None:
    assert TypeAdapter(field).validate_python(value) == read


def test_layers_of_a_sequence_count_as_often_as_it_repeats_them() -> None:
    class Echo(LayerSpec):
        """A custom layer, whose field is no number of repetitions."""

        name: Literal["echo"] = "echo"
        repeat: str = "twice"

    assert count_layers((Echo(), Sequence(body=(Relu(), Relu()), repeat=3))) == 1 + 1 + 3 * 2
